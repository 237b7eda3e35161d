"""`smp-tf run` on two hosts, which are namespaces of this machine (`two_hosts.py`)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from tests.distributed import left_behind
from tests.distributed.harness import ONE_THREAD, ROOT
from tests.distributed.two_hosts import ADDRESSES, TwoHosts

DEADLINE = 240.0
WHERE = "host-a:1,host-b:2"
SCRIPT = """
import os, signal, socket, sys, threading
names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GLOO_IFACE", "GLOO_RENDEZVOUS_ADDR")
rank = os.environ["HOROVOD_RANK"]
print("here", socket.gethostname(), *(os.environ[f"HOROVOD_{name}"] for name in names), os.getcwd(), flush=True)
if sys.argv[1] == "wait" or (sys.argv[1] == "fail" and rank != "2"):
    threading.Event().wait()
if sys.argv[1] == "fail":
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Run:
    """A `smp-tf run` on host-a.

    Args:
        hosts: the hosts.
        words: its options, the script and its arguments.
        folder: where it runs.
    """

    def __init__(self, hosts: TwoHosts, words: list[str], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        (folder / "job.py").write_text(SCRIPT)
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), left_behind.MARK: self.mark}
        environment |= {"TF_ENABLE_ONEDNN_OPTS": "0", "HOROVOD_CYCLE_TIME": "60"}
        command = hosts.command([sys.executable, "-m", "smp_tf.command.main", "run", *words])
        command[command.index(str(Path.cwd()))] = str(folder)
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._overdue = threading.Timer(DEADLINE, left_behind.kill_all, [self.mark])
        self._overdue.start()
        assert self.process.stdout is not None
        self.stdout = self.process.stdout

    def await_ranks(self) -> None:
        """Waits until all ranks have told where they are."""
        for _ in range(3):
            assert "here host-" in self.stdout.readline()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the launcher, which `nsenter` has started."""
        words = [sys.executable, "-m", "smp_tf.command.main"]
        [launcher] = [pid for pid, line in left_behind.processes_of(self.mark).items() if line.split()[:3] == words]
        os.kill(launcher, number)

    def end(self) -> tuple[int, str, str]:
        """Returns the exit code and both outputs, and requires that no process is left on any host."""
        try:
            out, err = self.process.communicate()
            living = left_behind.wait_until_gone(self.mark, 20.0)
        finally:
            self._overdue.cancel()
            left_behind.kill_all(self.mark)
        assert living == {}, (out, err)
        return self.process.returncode, out, err


def test_ranks_run_on_both_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    code, out, err = Run(hosts, ["-H", WHERE, "job.py", "end"], tmp_path).end()
    assert (code, err) == (0, "")
    server = ADDRESSES["host-a"]
    assert sorted(out.splitlines()) == [
        f"[0] here host-a 0 0 1 0 2 eth0 {server} {tmp_path}",
        f"[1] here host-b 1 0 2 1 2 eth0 {server} {tmp_path}",
        f"[2] here host-b 2 1 2 0 1 eth0 {server} {tmp_path}",
    ]


@pytest.mark.full
def test_a_failure_names_the_host(hosts: TwoHosts, tmp_path: Path) -> None:
    code, _, err = Run(hosts, ["-H", WHERE, "--log-dir", "logs", "job.py", "fail"], tmp_path).end()
    assert code == 137
    assert re.search(r"rank 2 of 3 \(host host-b, process \d+\), killed by SIGKILL \(exit code 137\)", err), err
    assert (tmp_path / "logs/rank_2.log").read_text().splitlines()[1].startswith("here host-b 2")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_ranks_of_both_hosts(hosts: TwoHosts, tmp_path: Path, number: signal.Signals) -> None:
    job = Run(hosts, ["-H", WHERE, "job.py", "wait"], tmp_path)
    job.await_ranks()
    job.send(number)
    assert job.end()[0] == 128 + number


def test_ranks_of_both_hosts_end_with_a_launcher_that_is_killed(hosts: TwoHosts, tmp_path: Path) -> None:
    job = Run(hosts, ["-H", WHERE, "--grace", "1", "job.py", "wait"], tmp_path)
    job.await_ranks()
    job.send(signal.SIGKILL)
    job.end()


@pytest.mark.full
def test_a_host_that_is_lost_ends_the_job(hosts: TwoHosts, tmp_path: Path) -> None:
    job = Run(hosts, ["-H", WHERE, "job.py", "wait"], tmp_path)
    job.await_ranks()
    # The agent of host-b is known by its ranks: `ssh` gives it an environment of its own.
    ranks = [pid for pid, words in left_behind.processes_of(job.mark).items() if words.endswith("job.py wait")]
    here = os.readlink("/proc/self/ns/pid")
    [there, _] = [pid for pid in ranks if os.readlink(f"/proc/{pid}/ns/pid") != here]
    agent = re.search(r"^PPid:\s*(\d+)", Path(f"/proc/{there}/status").read_text(), re.MULTILINE)
    assert agent is not None
    os.kill(int(agent[1]), signal.SIGKILL)
    code, _, err = job.end()
    assert code == 1
    assert "lost with its host" in err
    assert "the connection to host host-b ended" in err


@pytest.mark.full
def test_hosts_that_cannot_be_reached_are_named(hosts: TwoHosts, tmp_path: Path) -> None:
    code, out, err = Run(hosts, ["-H", "host-a:1,10.79.0.9:1", "job.py", "end"], tmp_path).end()
    assert (code, out) == (2, "")
    assert err == (
        "smp-tf: The ranks of host 10.79.0.9 cannot be started: ssh: no host 10.79.0.9. Every host must be reached by "
        "`ssh 10.79.0.9` without a password, and have the same folder and Python at the same place.\n"
    )
    code, _, err = Run(hosts, ["-H", WHERE, "--network-interface", "eth9", "job.py", "end"], tmp_path).end()
    assert code == 2
    assert "finds no way to another host of the job. eth9: there is no such network interface." in err


@pytest.mark.full
def test_a_model_is_trained_over_both_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    script = str(ROOT / "tests/distributed/scripts/two_hosts.py")
    code, out, err = Run(hosts, ["-H", "host-a:1,host-b:1", script], tmp_path).end()
    assert code == 0, (out, err)
    told = [json.loads(text) for text in re.findall(r"training (\{.*\})", out + err)]
    assert len(told) == 2, (out, err)
    # A secret of the launcher's has come to both, and nothing has to be said of the network.
    assert "all that proves who they are" not in err
    assert "Messages between hosts may go over any network interface" not in err

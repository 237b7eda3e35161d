"""Jobs on two hosts, which are namespaces of this machine (`two_hosts.py`): what `horovodrun -H` starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

import pytest

from tests.distributed import left_behind
from tests.distributed.harness import ONE_THREAD, ROOT, launch_script
from tests.distributed.two_hosts import ADDRESSES, TwoHosts

SCRIPT = "tests/distributed/scripts/two_hosts.py"
DEADLINE = 240.0
LAUNCHER = [sys.executable, str(ROOT / "tests/distributed/launcher/horovodrun"), "--gloo", "--disable-cache"]


@dataclass
class Told:
    """What a job printed, and when (monotonic seconds) it had told of all ranks' training and when it ended."""

    text: str
    trained_at: float
    ended_at: float

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """What each rank says of itself."""
        told = [json.loads(text) for text in re.findall(r"training (\{.*\})", self.text)]
        return sorted(told, key=lambda rank: rank["rank"])

    def said_by(self, rank: int) -> str:
        return "\n".join(line for line in self.text.splitlines() if line.startswith(f"[{rank}]"))


def run(hosts: TwoHosts, where: str, *arguments: str, secret: str | None = None) -> Told:
    """Runs the script with `-H where` to its end."""
    mark = uuid.uuid4().hex
    size = sum(int(slots) for slots in re.findall(r":(\d+)", where))
    words = [*LAUNCHER, "-np", str(size), "-H", where, sys.executable, str(ROOT / SCRIPT), *arguments]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), left_behind.MARK: mark}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", "HOROVOD_CYCLE_TIME": "60"}
    environment |= {} if secret is None else {"SMP_TF_SECRET": secret}
    job = subprocess.Popen(
        hosts.command(words), env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    overdue = threading.Timer(DEADLINE, left_behind.kill_all, [mark])
    overdue.start()
    try:
        assert job.stdout is not None
        lines: list[str] = []
        trained_at = 0.0
        for line in job.stdout:
            lines.append(line)
            if "training {" in line:
                trained_at = time.monotonic()
        job.wait()
        return Told("".join(lines), trained_at, time.monotonic())
    finally:
        overdue.cancel()
        left_behind.kill_all(mark)


@pytest.fixture(scope="module")
def killed(hosts: TwoHosts) -> Told:
    """A job of three ranks on host-a and one on host-b, which is killed after some steps."""
    return run(hosts, "host-a:3,host-b:1", "--kill", "3", secret=uuid.uuid4().hex)


def test_two_hosts_train_as_one(killed: Told) -> None:
    one = launch_script(4, SCRIPT, environment=ONE_THREAD).expect_clean()
    expected = [
        json.loads(line.text.removeprefix("training "))
        for rank in range(4)
        for line in one.lines
        if line.rank == rank and line.text.startswith("training ")
    ]
    assert [rank["host"] for rank in killed.ranks] == ["host-a", "host-a", "host-a", "host-b"], killed.text
    assert [rank["replica"] for rank in killed.ranks] == [0, 0, 1, 1]
    assert [rank["losses"] for rank in killed.ranks] == [rank["losses"] for rank in expected]


TRUSTED = "all that proves who they are was told over the network between these"


def test_the_launcher_hands_the_secret_to_other_hosts(killed: Told) -> None:
    """Else those ranks would have none, and smp.init would say so."""
    assert len(killed.ranks) == 4, killed.text
    assert TRUSTED not in killed.text


@pytest.mark.full
def test_without_a_secret_rank_0_says_what_the_network_must_be_trusted_for(hosts: TwoHosts) -> None:
    told = run(hosts, "host-a:1,host-b:1", "--kill", "1")
    assert told.text.count(TRUSTED) == 1, told.text
    assert TRUSTED in told.said_by(0), told.text


def test_shared_memory_within_a_host_and_only_the_launchers_interface_between_hosts(killed: Told) -> None:
    host_of = {rank["rank"]: rank["host"] for rank in killed.ranks}
    assert len(host_of) == 4, killed.text
    for rank in killed.ranks:
        for other, lanes in rank["lanes"].items():
            if host_of[int(other)] == rank["host"]:
                assert set(lanes) & {"posix", "sysv"}, killed.text
            else:
                assert lanes == ["tcp"], killed.text
        assert rank["interface"] == "eth0", killed.text
        assert rank["listening"] == [ADDRESSES[rank["host"]]], killed.text


def test_kill_9_on_another_host_ends_all_and_names_rank_host_and_step(killed: Told) -> None:
    process = killed.ranks[3]["process"]
    for rank in (0, 1, 2):
        lost = rf"smp_tf: (?:\[rank \d\] )?rank 3 \(host host-b, process {process}\) was lost: "
        # Whether this rank had begun the next step by then is as it comes.
        place = r"Rank \d \(host host-a\) was (?:after step 3|in step 4)"
        assert re.search(rf"{lost}.*{place}", killed.said_by(rank)), killed.text
        assert "finished" not in killed.said_by(rank)
    assert f"Process 3 exit with status code {128 + signal.SIGKILL}" in killed.text
    # Some seconds, on a machine that does nothing else.
    assert killed.ended_at - killed.trained_at < 60.0


def test_a_rank_that_is_alone_on_its_host_and_killed_in_smp_init_is_named_with_its_host(hosts: TwoHosts) -> None:
    """No rank of its host is left that could say it."""
    told = run(hosts, "host-a:2,host-b:1", "--kill-in-init", "2")
    lost = r"rank 2 \(host host-b, pid \d+\)"
    # Who has not come to smp.init before it is ended has nobody to wait for.
    said = rf"smp_tf: rank [01] \(host host-a\) was ended by SIGTERM in smp.init: {lost} had ended, or "
    assert re.search(rf"{said}|R{lost[1:]} ended while", told.text), told.text
    assert "training {" not in told.text

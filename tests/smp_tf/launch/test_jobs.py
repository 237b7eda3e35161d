"""Jobs of small scripts without TensorFlow: output, ends, signals, tries. Each is a `smp-tf run` of its own."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.full_only import params

SCRIPT = """
import os, signal, sys, threading, time
rank = int(os.environ["HOROVOD_RANK"])

def wait():
    threading.Event().wait()

"""
#: Seconds that only what hangs takes.
DEADLINE = 60.0


class Run:
    """A `smp-tf run` in a folder of its own.

    Args:
        folder: where the script is, and where it runs.
        body: what the script does.
        options: of `smp-tf run`.
        arguments: of the script.
    """

    def __init__(self, folder: Path, body: str, *options: str, arguments: tuple[str, ...] = ()) -> None:
        (folder / "job.py").write_text(SCRIPT + textwrap.dedent(body))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "HOROVOD"))}
        environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "smp_tf.command.main", "run", *options, "job.py", *arguments],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout

    def end(self) -> tuple[int, str, str]:
        """Returns how it ended: the exit code, and both outputs."""
        try:
            out, err = self.process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.process.communicate()) from None
        return self.process.returncode, out, err

    def pids(self, count: int) -> list[int]:
        """Returns the process numbers that so many lines of ranks tell."""
        return [int(self.stdout.readline().split()[-1]) for _ in range(count)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(body: str, *options: str, arguments: tuple[str, ...] = ()) -> Run:
        started.append(Run(tmp_path, body, *options, arguments=arguments))
        return started[-1]

    yield start
    for job in started:
        # Of a test that has failed. Its ranks end with it.
        job.process.kill()
        job.process.communicate()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pids: list[int]) -> None:
    """Waits until processes that are no children have ended."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([handle], [], [], DEADLINE)
        os.close(handle)
        assert ended, f"process {pid} still runs"


RunJob = Callable[..., Run]


def test_ranks_know_their_numbers_and_lines_are_marked(run: RunJob) -> None:
    body = """
        print(" ".join(sys.argv[1:]), *(os.environ[f"HOROVOD_{name}"] for name in (
            "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "CONTROLLER", "GLOO_IFACE")))
        print(os.environ["SMP_TF_TRY"], os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["GREETING"], file=sys.stderr)
        """
    arguments = ("--verbose", "-np", "a b")
    code, out, err = run(body, "-np", "2", "-x", "GREETING=hello", arguments=arguments).end()
    assert (code, sorted(err.splitlines())) == (0, ["[0] 1 2 hello", "[1] 1 2 hello"])
    assert sorted(out.splitlines()) == [f"[{r}] --verbose -np a b 2 {r} 2 0 1 gloo lo" for r in range(2)]


def test_lines_of_ranks_are_never_mixed(run: RunJob) -> None:
    body = """
        for number in range(300):
            for piece in (f"rank {rank}", " line ", f"{number}", chr(10)):
                sys.stdout.write(piece)
        """
    code, out, err = run(body, "-np", "3").end()
    assert (code, err) == (0, "")
    for rank in range(3):
        own = [line for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] rank {rank} line {number}" for number in range(300)]


def test_notices_are_left_out_unless_asked_for(run: RunJob) -> None:
    body = """
        print("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR", file=sys.stderr)
        print(os.environ.get("TF_CPP_MIN_LOG_LEVEL"), file=sys.stderr)
        """
    assert run(body, "-np", "1").end() == (0, "", "[0] 2\n")
    code, _, err = run(body, "-np", "1", "--verbose").end()
    assert (code, len(err.splitlines()), err.splitlines()[1]) == (0, 2, "[0] None")


def test_an_exception_is_told_in_a_block(run: RunJob) -> None:
    body = """
        if rank == 1:
            def build():
                raise ValueError("no such layer")
            build()
        wait()
        """
    code, out, err = run(body, "-np", "2", "--grace", "5").end()
    block = err[err.index("smp-tf: ") :].splitlines()
    assert (code, out) == (1, "")
    host = socket.gethostname()
    assert block[0] == "smp-tf: the job failed"
    assert re.fullmatch(rf"  who         rank 1 of 2 \(host {host}, process \d+\), exit code 1", block[1])
    assert re.fullmatch(r"  where       .*job\.py:\d+ in build", block[2])
    assert block[3:] == [
        "  why         ValueError: no such layer",
        "  what to do  --log-dir FOLDER keeps the output of each rank in a file of its own",
    ]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("sys.exit(7 * rank) if rank else wait()", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else wait()", 137, "killed by SIGKILL (exit code 137)"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSEGV) if rank else wait()",
            139,
            "killed by SIGSEGV (exit code 139)",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(run: RunJob, body: str, code: int, words: str) -> None:
    found, _, err = run(body, "-np", "2").end()
    assert found == code
    assert f", process {re.search('process ([0-9]+)', err)[1]}), {words}" in err  # type: ignore[index]
    assert "rank 1 of 2" in err
    if code == 137:
        assert "often it is the out-of-memory killer" in err


def test_ranks_have_a_moment_to_end_by_themselves(run: RunJob, tmp_path: Path) -> None:
    """Both fail, the one that another has told of it first. What smp_tf says names the rank that was the cause."""
    body = """
        said = f"smp_tf: [rank {rank}] rank 1 (host a, process 7) failed: ValueError: no (at train.py:3 in build)"
        print(said, file=sys.stderr)
        if rank == 0:
            with open("pipe", "w") as pipe:
                pipe.write(str(os.getpid()))
            sys.exit(1)
        # The agent waits for rank 0, and its number is gone then.
        first = open("pipe").read()
        while os.path.exists(f"/proc/{first}"):
            os.sched_yield()
        sys.exit(3)
        """
    os.mkfifo(tmp_path / "pipe")
    code, _, err = run(body, "-np", "2").end()
    assert code == 3, err
    assert "rank 1 of 2" in err
    assert "where       train.py:3 in build" in err
    assert "why         ValueError: no\n" in err


def test_output_goes_to_a_file_per_rank(run: RunJob, tmp_path: Path) -> None:
    body = "print('out', rank)\nprint('err', rank, file=sys.stderr)\nsys.exit(rank)"
    code, _, err = run(body, "-np", "2", "--log-dir", "logs").end()
    assert code == 1
    assert "what to do  all that rank 1 printed is in logs/rank_1.log" in err
    for rank in range(2):
        first, *lines = (tmp_path / f"logs/rank_{rank}.log").read_text().splitlines()
        assert re.fullmatch(rf"──── [\d: -]+: rank {rank} of 2 on {socket.gethostname()}, process \d+ ────", first)
        assert sorted(lines) == [f"err {rank}", f"out {rank}"]


@pytest.mark.parametrize("number", params([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], [signal.SIGHUP]))
def test_a_signal_ends_all_ranks(run: RunJob, number: signal.Signals) -> None:
    job = run("print(os.getpid())\nwait()", "-np", "2")
    pids = job.pids(2)
    job.process.send_signal(number)
    code, _, err = job.end()
    assert code == 128 + number
    assert err.splitlines() == [
        f"smp-tf: {number.name}: all ranks end, within 10 s. A second one kills them at once.",
        f"smp-tf: the job was ended by {number.name}.",
    ]
    assert not any(is_alive(pid) for pid in pids)


STUBBORN = """
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"no\\n"))
    os.fork()
    os.write(1, f"{os.getpid()}\\n".encode())
    while True:
        signal.pause()
    """


def test_a_signal_ends_ranks_also_while_nobody_reads(run: RunJob) -> None:
    job = run("print(os.getpid())\nwhile True: print(1000 * 'x')", "-np", "2")
    pids = job.pids(1)
    # Until its output is full, and it waits in the midst of a line.
    # (A system that does not tell what a process waits for says 0.)
    while not re.search("pipe|^0$", Path(f"/proc/{job.process.pid}/wchan").read_text()):
        os.sched_yield()
    job.process.send_signal(signal.SIGTERM)
    wait_for_end(pids)
    assert job.end()[0] == 143


def test_what_does_not_end_is_killed_with_its_children(run: RunJob) -> None:
    job = run(STUBBORN, "-np", "1", "--grace", "0.1")
    pids = job.pids(2)
    job.process.send_signal(signal.SIGTERM)
    code, out, _ = job.end()
    assert (code, out) == (143, "[0] no\n")
    wait_for_end(pids)


def test_a_second_signal_kills_at_once(run: RunJob) -> None:
    job = run(STUBBORN, "-np", "1", "--grace", "3600")
    pids = job.pids(2)
    job.process.send_signal(signal.SIGINT)
    assert job.stdout.readline() == "[0] no\n"
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    wait_for_end(pids)


def test_ranks_end_with_a_launcher_that_is_killed(run: RunJob) -> None:
    job = run("print(os.getpid())\nwait()", "-np", "2", "--grace", "0.1")
    pids = job.pids(2)
    job.process.kill()
    job.end()
    wait_for_end(pids)


def test_ranks_end_with_an_agent_that_is_killed(run: RunJob) -> None:
    job = run("print(os.getpid(), os.getppid())\nwait()", "-np", "2")
    lines = [job.stdout.readline().split() for _ in range(2)]
    os.kill(int(lines[0][2]), signal.SIGKILL)
    code, _, err = job.end()
    assert code == 1
    assert "lost with its host" in err
    assert f"the connection to host {socket.gethostname()} ended: it said nothing" in err
    wait_for_end([int(line[1]) for line in lines])


def test_a_failed_job_is_started_again(run: RunJob) -> None:
    body = """
        print("try", os.environ["SMP_TF_TRY"])
        if os.environ["SMP_TF_TRY"] != "3":
            os.kill(os.getpid(), signal.SIGKILL) if rank else wait()
        """
    code, out, err = run(body, "-np", "2", "--restarts", "2").end()
    assert code == 0
    assert sorted(out.splitlines()) == [f"[{rank}] try {number}" for rank in range(2) for number in (1, 2, 3)]
    said = [line for line in err.splitlines() if line.startswith("smp-tf: ")]
    again = "begins. A script goes on from its newest checkpoint if it restores it."
    assert said == [
        "smp-tf: the job failed (try 1 of 3)",
        f"smp-tf: try 2 of 3 {again}",
        "smp-tf: the job failed (try 2 of 3)",
        f"smp-tf: try 3 of 3 {again}",
    ]


@pytest.mark.full
def test_a_job_is_not_started_again_after_a_signal(run: RunJob) -> None:
    job = run("print(os.getpid())\nwait()", "-np", "1", "--restarts", "5")
    job.pids(1)
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 143


def test_the_store_of_the_ranks_is_open_on_this_host_alone(run: RunJob) -> None:
    body = """
        import http.client
        server = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        store = http.client.HTTPConnection(*server)
        store.request("PUT", "/scope/key", b"value")
        store.getresponse().read()
        store.request("GET", "/scope/key")
        print(server[0], store.getresponse().read().decode())
        """
    assert run(body, "-np", "1").end() == (0, "[0] 127.0.0.1 value\n", "")


def test_output_that_nobody_reads_is_dropped(run: RunJob, tmp_path: Path) -> None:
    job = run("print('first')\nfor _ in range(20000): print('more')\nopen('done', 'w').close()", "-np", "1")
    assert job.stdout.readline() == "[0] first\n"
    job.stdout.close()
    assert job.process.wait(DEADLINE) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.full
def test_the_hosts_name_is_this_host(run: RunJob) -> None:
    name = socket.gethostname()
    code, out, err = run("print(os.environ['HOROVOD_HOSTNAME'])", "-H", f"{name}:1,127.0.0.1:1").end()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[0] {name}", "[1] 127.0.0.1"]

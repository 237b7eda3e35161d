"""Jobs that Open MPI's mpirun starts, where Horovod was compiled with MPI."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import ONE_THREAD, ROOT

DEADLINE = 240.0
#: Root in a container, and more processes than cores.
OPTIONS = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


@pytest.fixture(scope="module", autouse=True)
def _with_mpi() -> None:
    def built() -> bool:
        import horovod.tensorflow as hvd

        return hvd.mpi_built()

    # To ask Horovod imports TensorFlow.
    if shutil.which("mpirun") is None or not built():
        pytest.skip("Horovod was compiled without MPI: the set-up found no mpicxx (apt-get install libopenmpi-dev).")


def started(size: int, script: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["mpirun", *OPTIONS, "-np", str(size), sys.executable, "-u", str(ROOT / script), *arguments]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen[str]]]:
    """Jobs to end with the test."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for job in made:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


@pytest.mark.timeout(600)
def test_two_replicas_of_two_stages_train_as_one_process(jobs: list[subprocess.Popen[str]]) -> None:
    arguments = ("--epochs", "1", "--steps", "6", "--depth", "1")
    jobs.append(started(4, "examples/replicas.py", *arguments))
    told, _ = jobs[0].communicate(timeout=DEADLINE)
    assert jobs[0].returncode == 0, told
    alone = subprocess.run(
        [sys.executable, str(ROOT / "examples/replicas.py"), *arguments],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    losses = [re.findall(r"replicas of . stages: loss ([\d.]+) nats", text) for text in (told, alone.stdout)]
    assert losses[0] == losses[1], told
    assert len(losses[0]) == 1
    assert sorted(re.findall(r"rank (\d): stage (\d) of replica (\d)", told)) == [
        *(("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1")),
    ]


@pytest.mark.timeout(600)
def test_an_exception_on_one_rank_ends_all_and_is_told(jobs: list[subprocess.Popen[str]]) -> None:
    jobs.append(started(2, "tests/distributed/scripts/training.py", "raise", "--rank", "1", "--at", "2"))
    told, _ = jobs[0].communicate(timeout=DEADLINE)
    assert jobs[0].returncode != 0
    assert re.search(r"smp_tf: \[rank \d\] rank 1 .* failed: LookupError", told), told


@pytest.mark.timeout(600)
def test_ranks_end_when_mpirun_is_killed(jobs: list[subprocess.Popen[str]]) -> None:
    jobs.append(started(2, "tests/distributed/scripts/training.py", "pause", "--rank", "1", "--at", "2"))
    assert jobs[0].stdout is not None
    ranks: set[int] = set()
    for line in jobs[0].stdout:
        if "step 1 done" in line:
            ranks = {int(pid) for pid in Path(f"/proc/{jobs[0].pid}/task/{jobs[0].pid}/children").read_text().split()}
            break
    assert len(ranks) == 2
    waits = [os.pidfd_open(pid) for pid in ranks]
    os.kill(jobs[0].pid, signal.SIGKILL)
    poll = select.poll()
    for fd in waits:
        poll.register(fd, select.POLLIN)
    ended = 0
    while ended < 2 and (events := poll.poll(10_000)):
        for fd, _ in events:
            poll.unregister(fd)
            ended += 1
    for fd in waits:
        os.close(fd)
    assert ended == 2

"""Processes that wait for lists of cases, so that not every launch starts and imports anew.

    launch() ──▶ Pools ──▶ Pool of 2 ──┬── next-0.pipe ──▶ rank 0: reads a folder, runs its cases, reads on
                     └───▶ Pool of 4   └── next-1.pipe ──▶ rank 1: the same; the pipe's end is its own

A rank that waits sleeps in `read`, and is stopped: Horovod's threads go on else. A pool is ended when one of its ranks
ended, when a script is to be launched beside nothing, when too many processes would wait, and with the session. What it
then left on the machine, or an end that was not clean, is an error of the test that is running: the report names the
lists of cases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from tests.distributed.case_worker import END, LIST_END, START
from tests.distributed.job import LAUNCHER, ROOT, Job, Line, Outcome

# Each holds some 300 MB of its own.
MOST_RANKS = 8
SECONDS_TO_END = 120.0


class Progress:
    """Follows the ranks through a list of cases: moves the deadline, keeps each case's output."""

    def __init__(self, size: int, count: int, seconds_per_case: float) -> None:
        self.output: list[list[list[str]]] = [[[] for _ in range(size)] for _ in range(count)]
        self.started: set[int] = set()
        self.finished: set[int] = set()
        self._current: list[int | None] = [None] * size
        self._seconds = seconds_per_case

    def take(self, job: Job, line: Line) -> None:
        if line.rank == LAUNCHER:
            return
        if line.text.startswith(START):
            self._current[line.rank] = index = int(line.text.removeprefix(START))
            if index not in self.started:
                self.started.add(index)
                job.expires_at = line.at + self._seconds
            return
        if line.text == LIST_END:
            self.finished.add(line.rank)
            return
        index = self._current[line.rank]
        if line.text.startswith(END) or index is None:
            return
        self.output[index][line.rank].append(line.text)


class Pool:
    """Ranks of one job that run one list of cases after the other.

    Args:
        size: number of processes.
        environment: variables for every rank.
    """

    def __init__(self, size: int, environment: Mapping[str, str]) -> None:
        self.size = size
        self._lists: list[str] = []
        self.job = Job(size, ROOT / "tests/distributed/case_worker.py", environment=environment)
        self.job.arguments = [str(self.job.folder)]
        self._pipes = []
        for rank in range(size):
            path = self.job.folder / f"next-{rank}.pipe"
            os.mkfifo(path)
            # Open for both, so that to open it does not wait for the rank.
            self._pipes.append(os.open(path, os.O_RDWR))
        self.job.start()

    def run(self, name: str, folder: Path, count: int, seconds_per_case: float) -> Progress:
        """Runs the list of cases in a folder; after it, `ended` says whether the ranks are still there.

        Args:
            name: what the list is called in reports.
            folder: holds `launch.json`, and then the results.
            count: number of cases.
            seconds_per_case: each case's deadline; to start the processes, 60 s or as long.
        """
        self._lists.append(name)
        progress = Progress(self.size, count, seconds_per_case)
        self.job.on_line = progress.take
        self.job.expires_at = time.monotonic() + max(seconds_per_case, 60.0)
        for pipe in self._pipes:
            os.write(pipe, f"{folder}\n".encode())
        self.job.follow(until=lambda: len(progress.finished) == self.size)
        return progress

    @property
    def ended(self) -> bool:
        """Whether one of the processes ended, or all were stopped at a deadline."""
        return self.job.timed_out or self.job.any_ended

    def stop(self) -> None:
        """Stops the ranks until `go_on`."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets ranks that are stopped run."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for rank in self.job.pids:
            # One that has ended is seen when the pool is used next.
            with contextlib.suppress(ProcessLookupError):
                self.job.kill(rank, number)

    def end(self) -> Outcome:
        """Lets the ranks end, and returns how the job went in all."""
        self.go_on()
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []
        self.job.on_line = None
        if not self.ended:
            self.job.expires_at = time.monotonic() + SECONDS_TO_END
            self.job.follow()
        return self.job.finish()

    def end_cleanly(self) -> None:
        """Ends the ranks; anything but a clean end is an error."""
        outcome = self.end()
        if outcome.returncode != 0 or outcome.timed_out or outcome.left_behind:
            raise AssertionError(f"The processes that ran {', '.join(self._lists)}:\n{outcome.report()}")
        outcome.forget()


class Pools:
    """The pools of a test session, by size and environment; those used last are kept."""

    def __init__(self) -> None:
        self._pools: dict[tuple[object, ...], Pool] = {}

    def take(self, size: int, environment: Mapping[str, str]) -> Pool:
        """Removes a pool from those that wait, or starts one."""
        key = (size, *sorted(environment.items()))
        if key in self._pools:
            pool = self._pools.pop(key)
            pool.go_on()
            return pool
        while self._pools and size + sum(pool.size for pool in self._pools.values()) > MOST_RANKS:
            self._pools.pop(next(iter(self._pools))).end_cleanly()
        return Pool(size, environment)

    def give_back(self, pool: Pool) -> None:
        """Lets a pool wait for the next list."""
        pool.stop()
        self._pools[(pool.size, *sorted(pool.job.environment.items()))] = pool

    def sizes(self) -> list[int]:
        """The sizes of those that wait; the one that would be ended first is first."""
        return [pool.size for pool in self._pools.values()]

    def end(self) -> None:
        """Ends all that wait."""
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.end_cleanly()


POOLS = Pools()

"""Starts the ranks of a test as processes and talks to them. See `rank_process.py`."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0


def full_stderr(kind: str) -> tuple[int, int]:
    """A pipe that holds all it can, which nobody reads; who writes waits, or hears so if it is "nonblocking"."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for size in (1 << 16, 1):
        try:
            while True:
                os.write(writing, b"\n" * size)
        except BlockingIOError:
            pass
    os.set_blocking(writing, kind == "blocking")
    return reading, writing


class RankProcess:
    """One rank: tells events, takes commands."""

    def __init__(self, part: str, rank: int, size: int, options: dict[str, Any], full_pipe: str = "") -> None:
        read_fd, write_fd = os.pipe()
        self._events = os.fdopen(read_fd, "rb", buffering=0)
        self._unread = b""
        self._stderr = b""
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TF_USE_LEGACY_KERAS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
        }
        pipe = full_stderr(full_pipe) if full_pipe else None
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("rank_process.py")),
                part,
                str(rank),
                str(size),
                json.dumps(options),
                str(write_fd),
            ],
            stdin=subprocess.PIPE,
            stderr=pipe[1] if pipe else subprocess.PIPE,
            pass_fds=[write_fd],
            env=environment,
            cwd=ROOT,
        )
        os.close(write_fd)
        if pipe is not None:
            os.close(pipe[1])
            self.process.stderr = os.fdopen(pipe[0], "rb", buffering=0)

    @property
    def pid(self) -> int:
        return self.process.pid

    def expect(self, event: str, timeout: float = TIMEOUT_S) -> dict[str, Any]:
        """The next thing the rank tells, which must be this event."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._events], [], [], max(0.0, left))
            chunk = os.read(self._events.fileno(), 1 << 16) if ready else b""
            if not chunk:
                what = "it ended" if ready else f"nothing came within {timeout} s"
                self.process.kill()
                raise AssertionError(f"waiting for {event!r}: {what}\n{self.stderr_to_end()}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        assert told["event"] == event, f"expected {event!r}, it told {told}"
        return told

    def command(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()

    def stderr_until(self, words: str, timeout: float = TIMEOUT_S) -> str:
        """Waits until these words are on stderr; returns what is there so far."""
        return self.stderr_of_any([self], words, timeout)[1]

    @staticmethod
    def stderr_of_any(ranks: Sequence[RankProcess], words: str, timeout: float = TIMEOUT_S) -> tuple[int, str]:
        """Waits until these words are on the stderr of one of the ranks; returns which, and what is there so far."""
        deadline = time.monotonic() + timeout
        streams = {rank.process.stderr: rank for rank in ranks if rank.process.stderr is not None}
        while not any(words.encode() in rank._stderr for rank in ranks):
            left = deadline - time.monotonic()
            ready, _, _ = select.select(list(streams), [], [], max(0.0, left))
            for stream in ready:
                chunk = os.read(stream.fileno(), 1 << 16)
                streams[stream]._stderr += chunk
                if not chunk:
                    del streams[stream]
            if not (ready and streams):
                raise AssertionError(f"{words!r} did not come; stderr: {[rank._stderr.decode() for rank in ranks]}")
        return next((n, rank._stderr.decode()) for n, rank in enumerate(ranks) if words.encode() in rank._stderr)

    def stderr_to_end(self) -> str:
        assert self.process.stderr is not None
        self._stderr += self.process.stderr.read()
        return self._stderr.decode()

    def wait(self, timeout: float) -> int:
        return self.process.wait(timeout)

    def messages(self) -> list[str]:
        """The lines of smp_tf on stderr, once the process has ended."""
        return [line for line in self.stderr_to_end().splitlines() if line.startswith("smp_tf: ")]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self._events, self.process.stdin, self.process.stderr):
            if stream is not None:
                stream.close()


class RankFleet:
    """The ranks of a test, connected; a context that leaves no process behind.

    Args:
        part: Name of the part in `rank_process.py`, or one per rank.
        size: Ranks.
        connect: Whether to wait until all are connected.
        per_rank: Options of single ranks, over `options`.
        full_pipes: Ranks whose stderr takes nothing, each with a kind that `full_stderr` knows.
        **options: Fields of `TransportOptions`, and `secret`.
    """

    def __init__(
        self,
        part: str | Sequence[str],
        size: int,
        *,
        connect: bool = True,
        per_rank: dict[int, dict[str, Any]] | None = None,
        full_pipes: Mapping[int, str] | None = None,
        **options: Any,
    ) -> None:
        parts = [part] * size if isinstance(part, str) else list(part)
        self.ranks = [
            RankProcess(parts[r], r, size, {**options, **(per_rank or {}).get(r, {})}, (full_pipes or {}).get(r, ""))
            for r in range(size)
        ]
        addresses = [rank.expect("address")["address"] for rank in self.ranks]
        for rank in self.ranks:
            rank.command(addresses)
        if connect:
            for rank in self.ranks:
                rank.expect("connected")

    def __getitem__(self, rank: int) -> RankProcess:
        return self.ranks[rank]

    def expect(self, event: str, timeout: float = TIMEOUT_S) -> list[dict[str, Any]]:
        return [rank.expect(event, timeout) for rank in self.ranks]

    def command(self, value: Any) -> None:
        for rank in self.ranks:
            rank.command(value)

    def command_each(self, *values: Any) -> None:
        """Each rank gets its own, in rank order."""
        for rank, value in zip(self.ranks, values, strict=True):
            rank.command(value)

    def __enter__(self) -> RankFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in self.ranks:
            rank.close()

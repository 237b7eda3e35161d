"""Processes that take turns. Each sleeps until it is told what to do, and all end together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parents[1]

WayT = TypeVar("WayT")


class TrainerError(RuntimeError):
    """A process ended, or did not answer in time. The message holds the end of its output."""


@dataclass
class Member:
    """One process: its rank, how long it took to start, and our connection to it."""

    rank: int
    pid: int
    start_seconds: float
    lines: Any


class Crew:
    """The processes of one way to do something. As a context manager it ends them.

    Args:
        way: the first argument of the script, such as "a", "b" or "c".
        arguments: the script's arguments after that, without the socket.
        processes: number of processes. Horovodrun starts them where there are several.
        patience: seconds within which every answer must come.
        script: file in `benchmarks` that the processes run.
        launch: command that starts the script, in place of Python and, for several processes, horovodrun.
        variables: environment variables of the processes, besides the caller's.
    """

    def __init__(
        self,
        way: str,
        arguments: Sequence[str],
        processes: int,
        patience: float,
        *,
        script: str = "processes/trainer.py",
        launch: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.way = way
        self._patience = patience
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._log = Path(self._folder.name) / "output"
        path = str(Path(self._folder.name) / "socket")
        if launch is None:
            launch = [sys.executable]
            if processes > 1:
                # Where Horovod has MPI, it would choose MPI. Its ranks look for messages without a pause, also while
                # others are measured.
                horovodrun = str(Path(sys.executable).with_name("horovodrun"))
                launch = [horovodrun, "--gloo", "-np", str(processes), *launch]
        command = [*launch, str(HERE / script), way, *arguments, path]
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("w") as log:
            listener.bind(path)
            listener.listen()
            listener.settimeout(1.0)
            self._launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment(), **(variables or {})},
                start_new_session=True,
            )
            self.members: list[Member] = []
            try:
                self._greet(listener, processes)
            except BaseException:
                self.end()
                raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _greet(self, listener: socket.socket, processes: int) -> None:
        deadline = time.monotonic() + self._patience
        while len(self.members) < processes:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._launcher.poll() is None and time.monotonic() < deadline:
                    continue
                raise self._failure(f"{len(self.members)} of {processes} processes came") from None
            connection.settimeout(self._patience)
            lines = connection.makefile("rw")
            connection.close()
            told = json.loads(lines.readline())
            self.members.append(Member(lines=lines, **told))
        self.members.sort(key=lambda member: member.rank)

    def ask(self, what: str, *, ranks: Sequence[int] | None = None, **arguments: Any) -> list[Any]:
        """Lets some ranks do something at the same time.

        Args:
            what: name of a method of the script's object, such as `Trainer`.
            ranks: ranks that do it, or None for all.
            arguments: arguments of the method.

        Returns:
            What the method returned on each rank.

        Raises:
            TrainerError: a rank ended, or did not answer in time.
        """
        chosen = [member for member in self.members if ranks is None or member.rank in ranks]
        for member in chosen:
            member.lines.write(json.dumps({"do": what, **arguments}) + "\n")
            member.lines.flush()
        return [self._answer(member, what) for member in chosen]

    def _answer(self, member: Member, what: str) -> Any:
        try:
            line = member.lines.readline()
        except TimeoutError:
            raise self._failure(f"rank {member.rank} has not finished {what!r} after {self._patience:.0f} s") from None
        if not line:
            raise self._failure(f"rank {member.rank} ended while it was to {what!r}")
        return json.loads(line)

    def _failure(self, what: str) -> TrainerError:
        words = self._log.read_text(errors="replace").splitlines()[-40:]
        return TrainerError("\n".join([f"({self.way}): {what}. The end of its output:", *words]))

    def cpu_seconds(self) -> float:
        """Returns the processor time that all its processes have used so far."""
        ticks = 0
        for member in self.members:
            fields = Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        """Stops all its processes, so that none of their threads looks for work, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets paused processes go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for member in self.members:
            # A process that has ended is reported when it is asked.
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def end(self) -> None:
        """Ends all processes. They end in good order when their sockets close."""
        for member in self.members:
            member.lines.close()
        self.resume()
        try:
            self._launcher.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
        self._folder.cleanup()


def there_and_back(ways: Iterable[WayT], repetitions: int) -> Iterator[tuple[int, list[WayT]]]:
    """Yields every repetition and the order of its turns, so that no way is always first."""
    order = list(ways)
    for repetition in range(repetitions):
        yield repetition, order if repetition % 2 == 0 else order[::-1]


def environment() -> dict[str, str]:
    """Returns the caller's environment, with what every process of the benchmark needs."""
    path = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "TF_USE_LEGACY_KERAS": "1",
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
    }

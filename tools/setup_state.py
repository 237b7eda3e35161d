"""What a set-up leaves for the next one: the steps that are done, who is at work, and children that were left."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def digest(*parts: str | Path) -> str:
    """Hashes texts, and files by their name and content, into one key.

    Args:
        parts: texts, or paths of files. A missing file counts as such.

    Returns:
        A hexadecimal key.
    """
    hasher = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            content = part.read_bytes() if part.is_file() else b"(no such file)"
            hasher.update(part.name.encode() + b"\0" + content)
        else:
            hasher.update(part.encode())
        hasher.update(b"\0\0")
    return hasher.hexdigest()


class Stamps:
    """The finished steps of one environment: a file per step, with the key for which it was done.

    The stamps are inside the environment, so they are deleted with it.
    """

    def __init__(self, folder: Path) -> None:
        """Args: folder: where the stamps are; made when the first one is written."""
        self._folder = folder

    def holds(self, step: str, key: str) -> bool:
        """Returns whether a step was finished for this key."""
        file = self._folder / step
        return file.is_file() and file.read_text() == key

    def clear(self, step: str) -> None:
        """Forgets a step, before it is done again."""
        (self._folder / step).unlink(missing_ok=True)

    def write(self, step: str, key: str) -> None:
        """Notes that a step is finished. The note appears whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f".{step}.new"
        unfinished.write_text(key)
        unfinished.rename(self._folder / step)


class Lock:
    """A lock that ends with its process, however that ends. The file names its holder."""

    def __init__(self, path: Path) -> None:
        """Args: path: the lock file; its folder must exist."""
        self._file = open(path, "a+")  # noqa: SIM115 - the lock lasts while it is open

    def holder(self) -> str:
        """Returns the process id that the current holder wrote."""
        self._file.seek(0)
        return self._file.read().strip()

    def try_acquire(self) -> bool:
        """Takes the lock if it is free."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()
        return True

    def acquire(self, waiting: Callable[[str], None]) -> None:
        """Takes the lock, and calls `waiting(holder)` several times a second until it is free."""
        while not self.try_acquire():
            waiting(self.holder())
            time.sleep(0.1)


def _start_time(pid: int) -> str | None:
    """Returns when a process started, in clock ticks. That distinguishes it from a later one with the same id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


class ChildRecord:
    """Names the running child on disk, so that a set-up that is killed by -9 leaves no child unnoticed."""

    def __init__(self, path: Path) -> None:
        """Args: path: the file that names the child."""
        self._path = path

    def note(self, pid: int) -> None:
        """Records a child that leads its own process group."""
        self._path.write_text(f"{pid} {_start_time(pid)}")

    def forget(self) -> None:
        """Notes that the child has ended."""
        self._path.unlink(missing_ok=True)

    def end_leftover(self) -> None:
        """Ends the process group that a killed set-up left. Call it only while holding the lock."""
        if not self._path.is_file():
            return
        words = self._path.read_text().split()
        if len(words) == 2 and words[0].isdigit() and _start_time(int(words[0])) == words[1]:
            end_group(int(words[0]))
        self.forget()


def end_group(leader: int, grace: float = 3.0) -> None:
    """Ends a process group. It asks first, and kills after `grace` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(leader, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            with suppress(ChildProcessError):
                os.waitpid(leader, os.WNOHANG)
            try:
                os.killpg(leader, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)

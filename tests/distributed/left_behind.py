"""What a job leaves on the machine after it ended: processes, shared memory, sockets.

Every process of a job carries the job's mark in its environment, which children inherit even when
they leave their parent's session. So the processes of a job are found by reading /proc, and other
jobs on the same machine are never touched.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from pathlib import Path

MARK = "SMP_TF_TEST_JOB"
SHARED_MEMORY = Path("/dev/shm")


def processes_of(mark: str) -> dict[int, str]:
    """Returns the living processes that carry the job's mark, as pid to command line."""
    wanted = f"{MARK}={mark}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "Z":
                continue
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:  # it ended while we looked
            continue
        found[int(entry.name)] = words.decode(errors="replace").strip()
    return found


def wait_until_gone(mark: str, seconds: float) -> dict[int, str]:
    """Waits for every process of a job to end and returns those that still live.

    Args:
        mark: the job's mark.
        seconds: how long to wait at most. A process that ends wakes the wait at once.
    """
    end = time.monotonic() + seconds
    while living := processes_of(mark):
        remaining = end - time.monotonic()
        if remaining <= 0:
            return living
        try:
            handle = os.pidfd_open(next(iter(living)))
        except ProcessLookupError:
            continue
        try:
            select.select([handle], [], [], remaining)
        finally:
            os.close(handle)
    return {}


def kill_all(mark: str) -> None:
    """Kills every process of a job, again and again until none is left (some may be forking)."""
    while living := processes_of(mark):
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        wait_until_gone(mark, 5.0)


def shared_memory_files() -> set[str]:
    """Returns the names of the shared-memory files that exist now.

    Left out are the semaphores that Python's multiprocessing makes and removes at once: any
    launcher that starts at this moment makes some, and no rank does.
    """
    names = {entry.name for entry in SHARED_MEMORY.iterdir()}
    return {name for name in names if not name.startswith("sem.mp-")}


def _in_use(names: set[str]) -> set[str]:
    """Returns those of the shared-memory files that a living process has mapped or opened."""
    used: set[str] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            paths = (process / "maps").read_text(errors="replace").splitlines()
            paths += [os.readlink(entry) for entry in (process / "fd").iterdir()]
        except OSError:
            continue
        for path in paths:
            if str(SHARED_MEMORY) in path:
                used |= {name for name in names if f"{SHARED_MEMORY}/{name}" in path}
    return used


def shared_memory_left(before: set[str]) -> list[str]:
    """Returns the shared-memory files that appeared since `before` and that nobody uses.

    A file that a living process still uses belongs to another job: this one's processes are gone.
    """
    new = shared_memory_files() - before
    new -= _in_use(new)
    return [f"shared-memory file {SHARED_MEMORY / name}" for name in sorted(new & shared_memory_files())]


def sysv_segments_left(creators: set[int]) -> list[str]:
    """Returns the System V shared-memory segments made by the given processes."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    creator, size = (lines[0].split().index(name) for name in ("cpid", "size"))
    rows = [line.split() for line in lines[1:]]
    return [f"System V segment {row[1]} of {row[size]} bytes" for row in rows if int(row[creator]) in creators]


def sockets_left(folder: Path) -> list[str]:
    """Returns the socket files below a folder."""
    return [f"socket {path}" for path in sorted(folder.rglob("*")) if stat.S_ISSOCK(path.lstat().st_mode)]

"""Removes shared memory that a rank which was killed has left behind.

While it is loaded, UCX makes a System V segment of a page, on which it tries out its hooks on memory, and removes it a
moment later. A rank that is killed in that moment cannot, and the system keeps such segments for ever; so ranks that
look whose process has ended remove what is left of it.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

_LIST = Path("/proc/sysvipc/shm")
_REMOVE = 0  # IPC_RMID
_OF_NOBODY_ELSE = "0"  # IPC_PRIVATE
# A process of another job may have had the same number before. Ranks of a job start within less.
_OLDEST = 3600.0

_libc = ctypes.CDLL(None)
_libc.shmctl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]


def remove_left_by(pid: int) -> None:
    """Removes segments that a process which has ended made for itself, and that nobody uses.

    Args:
        pid: the process, which ran as this user and on this machine.
    """
    for segment in _left_by(pid):
        # Another rank may have been faster.
        _libc.shmctl(segment, _REMOVE, None)


def _left_by(pid: int) -> list[int]:
    try:
        header, *lines = _LIST.read_text().splitlines()
    except OSError:
        return []  # a system without such segments
    names = header.split()
    since = time.time() - _OLDEST
    left = []
    for line in lines:
        row = dict(zip(names, line.split(), strict=True))
        if (
            int(row["cpid"]) == pid
            and row["key"] == _OF_NOBODY_ELSE
            and row["nattch"] == "0"
            and int(row["uid"]) == os.getuid()
            and int(row["ctime"]) >= since
        ):
            left.append(int(row["shmid"]))
    return left

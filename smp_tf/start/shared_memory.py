"""Removes shared memory that a killed rank has left.

While UCX is loaded, it makes a System V segment of one page, tries its memory hooks on it, and removes it a moment
later. A rank that is killed in that moment cannot remove it, and the system keeps such segments for ever. So the ranks
that look for ended processes remove their segments.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

_LIST = Path("/proc/sysvipc/shm")
_REMOVE = 0  # IPC_RMID
_OF_NOBODY_ELSE = "0"  # IPC_PRIVATE
_PAGE = os.sysconf("SC_PAGESIZE")
# Seconds after which a process with the same number belonged to another job. Ranks of a job start within less.
_OLDEST = 3600.0
# A process that has ended may have a thread that has not, and that still maps memory.
_UNMAPPING_TIME = 0.5

_libc = ctypes.CDLL(None)
_libc.shmctl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]


def remove_left_by(pid: int) -> None:
    """Removes one-page segments that an ended process made for itself, and that nobody uses.

    Args:
        pid: the number of the process, which ran as this user and on this machine.
    """
    until = time.monotonic() + _UNMAPPING_TIME
    while left := _made_by(pid):
        for segment, is_used in left.items():
            if not is_used:
                # Another rank may have been faster.
                _libc.shmctl(segment, _REMOVE, None)
        if not any(left.values()) or time.monotonic() > until:
            return
        time.sleep(0.01)


def _made_by(pid: int) -> dict[int, bool]:
    """Returns such segments of a process, and whether somebody has them mapped."""
    try:
        header, *lines = _LIST.read_text().splitlines()
    except OSError:
        return {}  # a system without such segments
    names = header.split()
    since = time.time() - _OLDEST
    made = {}
    for line in lines:
        row = dict(zip(names, line.split(), strict=True))
        if (
            int(row["cpid"]) == pid
            and row["key"] == _OF_NOBODY_ELSE
            and int(row["size"]) == _PAGE
            and int(row["uid"]) == os.getuid()
            and int(row["ctime"]) >= since
        ):
            made[int(row["shmid"])] = row["nattch"] != "0"
    return made

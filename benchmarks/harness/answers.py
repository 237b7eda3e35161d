"""A benchmark's process, which answers questions over a socket and sleeps in between.

Needs nothing but Python, since processes of another framework's interpreter also import it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any


def resident(kind: str) -> int:
    """Returns the bytes of memory this process has ("VmRSS") or had at most ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return 1024 * int(line.split()[1])
    raise LookupError(f"/proc/self/status has no {kind}")


def forget_peak() -> None:
    """Begins anew to count how much memory this process had at most."""
    Path("/proc/self/clear_refs").write_text("5")


def seconds_alive() -> float:
    """Returns how long this process has been there."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def answer(asked: Any, rank: int, path: str) -> None:
    """Answers questions until nobody asks any more. Each line is one JSON object.

    Args:
        asked: object whose methods answer. They take the line's other entries.
        rank: rank of this process.
        path: path of the socket.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw")

        def say(value: Any) -> None:
            lines.write(json.dumps(value) + "\n")
            lines.flush()

        say({"rank": rank, "pid": os.getpid(), "start_seconds": seconds_alive()})
        for line in lines:
            told = json.loads(line)
            say(getattr(asked, told.pop("do"))(**told))

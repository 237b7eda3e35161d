"""Records what this process does in its steps, and when, by the recorder of the C library.

    recorder.start(first=10, last=12)      # steps are counted from here, from 0
    ...                                    # steps run
    points, dropped = recorder.stop()

A point is the begin or end of a step, of a task, of a send or of a receive. While it is off, it costs next to nothing.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from typing import NamedTuple

from smp_tf.ops.library import transport_library

__all__ = ["Event", "Point", "clock", "count_program", "is_on", "start", "stop"]

#: The most points of one recording, 88 bytes each. They are enough for some hundred steps of some hundred tasks.
CAPACITY = 1 << 17


class Event(enum.IntEnum):
    """What begins or ends at a point."""

    STEP = 0
    TASK = 1
    SEND = 2
    RECV = 3


class Point(NamedTuple):
    """One moment of a recording.

    Attributes:
        time_ns: Nanoseconds of the host's monotonic clock.
        event: What begins or ends.
        is_end: Whether it ends.
        program: Number of the step function's program.
        step: Number of its step; -1 for the step that began last.
        edge: The number of the edge, of a send or a receive.
        microbatch: The microbatch, of a send or a receive.
        peer: The other rank, of a send or a receive.
        bytes: The bytes of a send, or of a receive that has ended.
        task: The text of a task.
    """

    time_ns: int
    event: Event
    is_end: bool
    program: int
    step: int
    edge: int = 0
    microbatch: int = 0
    peer: int = 0
    bytes: int = 0
    task: str = ""


class _Point(ctypes.Structure):
    _fields_ = [
        ("time_ns", ctypes.c_int64),
        ("program", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("edge", ctypes.c_uint64),
        ("microbatch", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("peer", ctypes.c_uint32),
        ("event", ctypes.c_int32),
        ("is_end", ctypes.c_int32),
        ("task", ctypes.c_char * 28),
    ]


def start(first: int = 0, last: int | None = None, capacity: int = CAPACITY) -> bool:
    """Begins to count the steps of counted programs, and records some of them.

    Args:
        first: Number of the first step that is recorded, from 0 at this call.
        last: Number of the last one; None for no end.
        capacity: The most points that are kept.

    Returns:
        Whether it has begun. It is False where a recording is under way already.
    """
    return bool(_functions().smp_timeline_start(capacity, first, -1 if last is None else last))


def stop() -> tuple[list[Point], int]:
    """Ends the recording.

    Returns:
        The points in the order in which they were noted, and how many more there were than could be kept.
    """
    library = _functions()
    dropped = ctypes.c_uint64()
    count = library.smp_timeline_stop(ctypes.byref(dropped))
    found = (_Point * count)()
    count = library.smp_timeline_take(found, count)
    points = [
        Point(
            p.time_ns,
            Event(p.event),
            bool(p.is_end),
            p.program,
            p.step,
            p.edge,
            p.microbatch,
            p.peer,
            p.bytes,
            p.task.decode(),
        )
        for p in found[:count]
    ]
    return points, dropped.value


def count_program(program: int) -> None:
    """Makes steps of a program count. Steps of other programs are recorded where they come between."""
    _functions().smp_timeline_count_program(program)


def is_on() -> bool:
    """Returns whether what runs now is recorded."""
    return bool(_functions().smp_timeline_is_on())


def clock() -> int:
    """Returns the nanoseconds of the clock of all points. Processes of one host share it."""
    return int(_functions().smp_timeline_clock())


@functools.cache
def _functions() -> ctypes.CDLL:
    """Returns the library with the types of these functions declared."""
    library = transport_library()
    size, i64 = ctypes.c_size_t, ctypes.c_int64
    library.smp_timeline_start.argtypes = [size, i64, i64]
    library.smp_timeline_count_program.argtypes = [ctypes.c_uint64]
    library.smp_timeline_count_program.restype = None
    library.smp_timeline_is_on.argtypes = []
    library.smp_timeline_stop.argtypes = [ctypes.c_void_p]
    library.smp_timeline_stop.restype = size
    library.smp_timeline_take.argtypes = [ctypes.c_void_p, size]
    library.smp_timeline_take.restype = size
    library.smp_timeline_clock.restype = i64
    return library

"""Tells the user what to know, in plain words."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from typing import TextIO

from smp_tf.ops.plain_text import plain_text

_said: set[str] = set()
# The longest that a thread which others rely upon waits for whoever reads standard error.
_PRINTING_TIME = 1.0


def announce(text: str, rank: int) -> None:
    """Says something once per process, if this is rank 0.

    Args:
        text: One sentence or two.
        rank: This process's world rank.
    """
    if rank == 0 and text not in _said:
        _said.add(text)
        tell(f"smp_tf: {text}")


def tell(text: str) -> None:
    """Writes lines to standard error, in one piece: what another thread writes comes before or after them.

    `print` writes the end of the line by itself. Where standard error is closed, or its disk is full, nothing is said.

    Args:
        text: Lines, the last one without its end. Control characters in them come out in words.
    """
    # A script may have closed it, or have none.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"{plain_text(text)}\n")
        sys.stderr.flush()


def tell_in_time(text: str) -> None:
    """Tells it in a thread that others rely upon: it goes on after a second, also where nobody reads.

    Args:
        text: Lines, as `tell` takes them.
    """
    words = f"{plain_text(text)}\n"
    thread = threading.Thread(target=_write, args=(words,), name="smp_tf words", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Python has nearly ended, or the user may have no more threads (ulimit -u).
        if has_room(sys.stderr, _PRINTING_TIME):
            # No more than a pipe that has room takes without a wait.
            _write(words.encode(errors="backslashreplace")[: select.PIPE_BUF].decode(errors="ignore"))
        return
    thread.join(_PRINTING_TIME)


def has_room(stream: TextIO | None, seconds: float = 0.0) -> bool:
    """Tells whether a stream takes words; also of one that is closed or has no descriptor, since nobody waits there.

    Args:
        stream: Standard error or output.
        seconds: How long to wait until it does.
    """
    if stream is None:
        return True
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def _write(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        stream = sys.__stderr__
        if stream is None or sys.stderr is not stream:
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        # Past Python's stream: Python ends in an error while a thread that is kept waiting has its lock.
        descriptor, left = stream.fileno(), text.encode(errors="backslashreplace")
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:
                select.select([], [descriptor], [])

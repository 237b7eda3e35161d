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
# The most seconds that a thread which others rely upon waits for the reader of standard error.
_PRINTING_TIME = 1.0
_WIDEST = 100


def announce(text: str, rank: int, about: str | None = None) -> None:
    """Says something once per process, if this is rank 0.

    Args:
        text: One sentence or two.
        rank: This process's world rank.
        about: What it is said about, once whatever the text is; None where it is said once in these words.
    """
    key = text if about is None else about
    if rank == 0 and key not in _said:
        _said.add(key)
        tell(f"smp_tf: {text}")


def tell(text: str) -> None:
    """Writes lines to standard error in one piece, so that another thread's lines come before or after them.

    `print` would write the end of the line separately. Where standard error is closed, or its disk is full, nothing is
    written.

    Args:
        text: Lines, the last one without its end. Control characters in them are written as words.
    """
    # A script may have closed it, or may have none.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"{plain_text(text)}\n")
        sys.stderr.flush()


def tell_in_time(text: str) -> None:
    """Writes lines in a thread that others rely upon, and goes on after a second even if nobody reads.

    Args:
        text: Lines, as for `tell`.
    """
    words = f"{plain_text(text)}\n"
    thread = threading.Thread(target=_write, args=(words,), name="smp_tf words", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Python has nearly ended, or the user may have no more threads (ulimit -u).
        if has_room(sys.stderr, _PRINTING_TIME):
            # At most what a pipe with room takes without a wait.
            _write(words.encode(errors="backslashreplace")[: select.PIPE_BUF].decode(errors="ignore"))
        return
    thread.join(_PRINTING_TIME)


def columns() -> int:
    """Returns how wide a table on standard error may be: as its terminal, and at most 100; 100 without a terminal."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return _WIDEST
    # A terminal that does not know its width says 0.
    return min(width, _WIDEST) or _WIDEST


def has_room(stream: TextIO | None, seconds: float = 0.0) -> bool:
    """Returns whether a stream takes text. One that is closed or has no descriptor does, since nothing waits there.

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
        # This bypasses Python's stream, since Python ends in an error while a waiting thread has its lock.
        descriptor, left = stream.fileno(), text.encode(errors="backslashreplace")
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:
                select.select([], [descriptor], [])

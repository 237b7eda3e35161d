r"""Makes whole lines of what a process writes bit by bit, as a terminal would show them in the end.

    "epoch 1\n 1/9 [>..]\r 2/9 [=>.]\r ... 9/9 [====]\n"  ──▶  "epoch 1", a bar every few seconds, the last bar

A carriage return begins the same line again. So what it replaces is a state of progress, and only few of these make a
line. Nothing is dropped that no carriage return has replaced.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable, Iterator

#: Seconds between two lines of progress that is written over and over.
INTERVAL = 5.0
_ENDS = re.compile(r"([\r\n])")
#: What only moves the cursor, or clears what is there.
_MOVES = re.compile(r"\x1b\[\d*(?:;\d*)*[A-HJKSTfsu]|\x1b\[\?\d+[hl]")


class LineStream:
    """Makes lines of one output of one process.

    Args:
        interval: seconds between two lines of progress.
        clock: returns the time in seconds.
    """

    def __init__(self, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._interval, self._clock = interval, clock
        self._current = ""
        #: What a carriage return has left on the line, until something replaces it.
        self._left: str | None = None
        self._told_at: float | None = None

    def lines(self, data: bytes) -> Iterator[str]:
        """Yields the lines that are complete, without their ends.

        Args:
            data: what was written after the last call.
        """
        yield from self._lines(self._decoder.decode(data))

    def rest(self) -> Iterator[str]:
        """Yields what was written without an end of a line. Nothing comes after it."""
        yield from self._lines(self._decoder.decode(b"", final=True))
        if _shown(self._current).strip() or self._left is not None:
            yield self._taken()

    def _lines(self, text: str) -> Iterator[str]:
        for part in _ENDS.split(text):
            if part == "\n":
                self._told_at = None
                yield self._taken()
            elif part == "\r":
                if _shown(self._current):
                    self._left = self._current
                self._current = ""
            elif part:
                was_empty = not _shown(self._current)
                self._current += part
                if self._left is not None and was_empty and _shown(self._current):
                    yield from self._progress(self._left)
                    self._left = None

    def _progress(self, text: str) -> Iterator[str]:
        """Yields a state of progress that is replaced, if the last one was told long ago."""
        now = self._clock()
        if self._told_at is None or now - self._told_at >= self._interval:
            self._told_at = now
            yield _shown(text)

    def _taken(self) -> str:
        """Returns the line as it stands, and begins a new one."""
        text, self._current = self._current, ""
        if not _shown(text) and self._left is not None:
            text = self._left
        self._left = None
        return _shown(text) if "\b" in text or "\x1b" in text else text


def _shown(text: str) -> str:
    r"""Returns what is seen of a text, without what moves the cursor.

    A character after a `\b` takes the place of the one before it.
    """
    text = _MOVES.sub("", text).rstrip("\b")
    if "\b" not in text:
        return text
    seen: list[str] = []
    for character in text:
        if character != "\b":
            seen.append(character)
        elif seen:
            seen.pop()
    return "".join(seen)

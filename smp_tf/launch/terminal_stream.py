r"""Shows on a terminal what one rank writes to a terminal of its own, and lines of other ranks between.

Progress bars stay whole: carriage returns and colours go through as they are. The rank's mark comes first in each line,
so the rank's terminal is narrower by it. A line of another rank takes the place of an unfinished line, which comes
again under it:

    [0] 3/9 [==>.....]      ──▶      [1] a line of rank 1
                                     [0] 3/9 [==>.....]
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

from smp_tf.launch.notices import is_notice, may_become_notice

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR = "\r\x1b[2K"
#: A line's end, a carriage return, a backspace, a sequence for the terminal, other text.
_PARTS = re.compile(
    r"\r\n|\n|\r|\x08+|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])|[^\r\n\x08\x1b]+|\x1b"
)
#: The begin of an escape sequence, or of a line's end. The rest may come with the next piece.
_BEGUN = re.compile(r"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*)?|\r)$")


class Terminal:
    """The terminal that both outputs of the launcher lead to.

    Args:
        write: writes a text to it.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        #: The rank's output whose line is unfinished.
        self.owner: TerminalStream | None = None

    def show(self, line: str) -> None:
        """Shows a whole line, above the one that is unfinished."""
        unfinished = self.owner.unfinished if self.owner is not None else ""
        if unfinished:
            self.write(f"{_CLEAR}{line}\n{unfinished}")
        else:
            self.write(f"{line}\n")

    def finish_line(self) -> None:
        """Ends the line that is unfinished."""
        if self.owner is not None:
            owner, self.owner = self.owner, None
            if owner.unfinished:
                self.write("\n")
            owner.forget_line()


class TerminalStream:
    """Shows one output of a rank.

    Args:
        terminal: where it is shown.
        mark: what is put before each line.
        drops_notices: whether TensorFlow's notices are left out.
    """

    def __init__(self, terminal: Terminal, mark: str, drops_notices: bool) -> None:
        self._terminal, self._mark, self._drops_notices = terminal, mark, drops_notices
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._hides_cursor = False
        self.forget_line()

    def forget_line(self) -> None:
        """Begins a new line."""
        self._is_at_start, self._line = True, ""

    @property
    def unfinished(self) -> str:
        """What shows the unfinished line again, with the cursor in its place."""
        return f"{self._line}\r" if self._line and self._is_at_start else self._line

    def feed(self, data: bytes) -> None:
        """Shows what the rank has written.

        Args:
            data: as it was written.
        """
        self._show(self._decoder.decode(data), is_last=False)

    def end(self) -> None:
        """Shows what was held back, and ends the line."""
        self._show(self._decoder.decode(b"", final=True), is_last=True)
        if self._terminal.owner is self:
            self._terminal.finish_line()
        if self._hides_cursor:
            self._terminal.write(_SHOW_CURSOR)

    def _show(self, text: str, is_last: bool) -> None:
        text, self._held = self._held + text, ""
        if not is_last and (begun := _BEGUN.search(text)) is not None:
            text, self._held = text[: begun.start()], begun[0]
        shown: list[str] = []
        parts = _PARTS.findall(text)
        for number, part in enumerate(parts):
            if self._drops_notices and not self._line and may_become_notice(part):
                if number + 1 == len(parts) and not is_last:
                    self._held = part + self._held
                    break
                if is_notice(part):
                    parts[number + 1 : number + 2] = [""]
                    continue
            shown.append(self._taken(part))
        words = "".join(shown)
        if not words:
            return
        if self._terminal.owner is not self:
            self._terminal.finish_line()
        self._terminal.owner = self
        self._terminal.write(words)

    def _taken(self, part: str) -> str:
        """Returns what is written for a part, and follows where the cursor is."""
        if part in ("\n", "\r\n"):
            words = f"{self._mark.rstrip()}\n" if not self._line else "\n"
            self.forget_line()
            return words
        if part == "\r":
            self._is_at_start = True
            return "\r" if self._line else ""
        if part.startswith("\b"):
            if self._is_at_start:
                return ""
            self._line += part
            return part
        if part in (_HIDE_CURSOR, _SHOW_CURSOR):
            self._hides_cursor = part == _HIDE_CURSOR
            return part
        if part.startswith("\x1b") and not (part.endswith("m") and self._is_at_start):
            self._line += "" if self._is_at_start else part
            return part
        if part and self._is_at_start:
            self._is_at_start, self._line = False, f"{self._mark}{part}"
            return self._line
        self._line += part
        return part

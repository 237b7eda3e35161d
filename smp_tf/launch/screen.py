"""Shows what all ranks print: each line marked by its rank, and lines of several ranks never mixed."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from smp_tf.launch.agent import ERR, OUT
from smp_tf.launch.line_stream import LineStream
from smp_tf.launch.log_folder import LogFolder
from smp_tf.launch.notices import is_notice
from smp_tf.launch.terminal_stream import Terminal, TerminalStream

#: The rank whose progress bars are shown.
SHOWN = 0
#: Lines of each rank that are kept for the report of a failure.
_KEPT = 1000
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")


_COLORS_OF_TEXT = re.compile(r"\x1b\[[\d;:]*m")


@dataclass(frozen=True)
class Output:
    """An output of the launcher.

    Args:
        write: writes a text to it, and drops what nobody reads.
        size: rows and columns, if it is a terminal.
        color: the colors that it shows; None for none.
        ask_size: returns rows and columns as they are now.
    """

    write: Callable[[str], object]
    size: tuple[int, int] | None = None
    color: ColorSystem | None = None
    ask_size: Callable[[], tuple[int, int] | None] = lambda: None

    @classmethod
    def of(cls, stream: TextIO | None, write: Callable[[str], object]) -> Output:
        """Returns what is known of an output.

        Args:
            stream: the output; None where the process has none.
            write: writes a text to it.
        """
        if stream is None:
            return cls(write)
        console = Console(file=stream)
        # A variable such as FORCE_COLOR may ask for colors where there is no terminal.
        colors = _SYSTEMS.get(console.color_system or "") if console.is_terminal else None
        size = None if console.is_dumb_terminal else size_of(stream)
        return cls(write, size, colors, lambda: size_of(stream))


_SYSTEMS = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
}


def size_of(stream: TextIO) -> tuple[int, int] | None:
    """Returns rows and columns of a terminal; None where it is none, or does not say."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return None
    return (rows, columns) if columns > 0 else None


@dataclass
class _Stream:
    """One output of one rank."""

    lines: LineStream = field(default_factory=LineStream)
    shown: TerminalStream | None = None


class Screen:
    """Shows what the ranks of a job print.

    Args:
        size: number of ranks.
        outputs: standard output and standard error of this launcher.
        logs: a file per rank, if there are to be some.
        drops_notices: whether TensorFlow's notices are left out.
    """

    def __init__(
        self, size: int, outputs: Sequence[Output], logs: LogFolder | None = None, drops_notices: bool = True
    ) -> None:
        self._outputs = dict(zip((OUT, ERR), outputs, strict=True))
        self._logs, self._drops_notices = logs, drops_notices
        self._digits = len(str(size - 1))
        self._terminal = Terminal(next((o.write for o in outputs if o.size is not None), outputs[1].write))
        self._streams: dict[tuple[int, int], _Stream] = {}
        #: What each rank has printed last, the latest line last.
        self.kept: dict[int, deque[str]] = {rank: deque(maxlen=_KEPT) for rank in range(size)}
        #: What smp_tf has said on any rank, in the order in which it came.
        self.said: list[tuple[int, str]] = []

    @property
    def width(self) -> int | None:
        """Returns the columns of the terminal that the launcher's words go to; None where it is none."""
        size = self._outputs[ERR].size
        return None if size is None else size[1]

    @property
    def is_colored(self) -> bool:
        """Returns whether the launcher's words are colored."""
        return self._outputs[ERR].color is not None

    def look_at_size(self) -> None:
        """Learns the size of the terminal, which may have changed."""
        self._outputs = {
            kind: replace(output, size=output.ask_size()) if output.size is not None else output
            for kind, output in self._outputs.items()
        }

    def size_for(self, rank: int, kind: int) -> tuple[int, int] | None:
        """Returns rows and columns of the terminal that a rank's output is to be; None for a pipe.

        Args:
            rank: the rank.
            kind: OUT or ERR.
        """
        size = self._outputs[kind].size
        if rank != SHOWN or size is None:
            return None
        rows, columns = size
        return rows, max(1, columns - len(self._plain_mark(rank)))

    def begin(self, rank: int, about: str) -> None:
        """Notes that a rank's process begins.

        Args:
            rank: the rank.
            about: words for the process, for its file.
        """
        self.kept[rank].clear()
        if self._logs is not None:
            self._logs.begin(rank, about)
        for kind in (OUT, ERR):
            stream = self._streams[rank, kind] = _Stream()
            if self.size_for(rank, kind) is not None:
                stream.shown = TerminalStream(self._terminal, self._mark(rank, kind), self._drops_notices)

    def take(self, rank: int, kind: int, data: bytes) -> None:
        """Shows what a rank has written.

        Args:
            rank: the rank.
            kind: OUT or ERR.
            data: as it was written.
        """
        stream = self._streams[rank, kind]
        if stream.shown is not None:
            stream.shown.feed(data)
        self._take_lines(rank, kind, stream, stream.lines.lines(data))

    def end(self, rank: int) -> None:
        """Shows what a rank has written without the end of a line. Its process has ended."""
        for kind in (OUT, ERR):
            stream = self._streams.pop((rank, kind))
            if stream.shown is not None:
                stream.shown.end()
            self._take_lines(rank, kind, stream, stream.lines.rest())

    def say(self, text: str) -> None:
        """Shows words of the launcher itself.

        Args:
            text: one line or several.
        """
        self._show(ERR, text)

    def _take_lines(self, rank: int, kind: int, stream: _Stream, lines: Iterator[str]) -> None:
        for line in lines:
            # What is written for a terminal has colors, as tracebacks of newer versions of Python.
            plain = _COLORS_OF_TEXT.sub("", line)
            if self._drops_notices and is_notice(plain):
                continue
            self.kept[rank].append(plain)
            # A library's thread may have begun the line with words of its own.
            if (begin := plain.find("smp_tf: ")) >= 0:
                self.said.append((rank, plain[begin:]))
            if self._logs is not None:
                self._logs.add(rank, plain)
            if stream.shown is None:
                self._show(kind, f"{self._mark(rank, kind)}{line}".rstrip())

    def _show(self, kind: int, line: str) -> None:
        output = self._outputs[kind]
        if output.size is not None:
            self._terminal.show(line)
        else:
            output.write(f"{line}\n")

    def _plain_mark(self, rank: int) -> str:
        return f"[{rank:>{self._digits}}] "

    def _mark(self, rank: int, kind: int) -> str:
        color, mark = self._outputs[kind].color, self._plain_mark(rank)
        if color is None:
            return mark
        style = Style.parse(_COLORS[rank % len(_COLORS)])
        return f"{style.render(mark.rstrip(), color_system=color)} "

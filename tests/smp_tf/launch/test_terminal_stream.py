"""What is shown on a terminal: rank 0's bars as they are, lines of others between, and marks."""

from __future__ import annotations

from smp_tf.launch.terminal_stream import Terminal, TerminalStream

CLEAR = "\r\x1b[2K"


class Shown:
    """A terminal, two outputs of a rank, and what was written to it since the last look."""

    def __init__(self, drops_notices: bool = True) -> None:
        self._written = ""
        self.terminal = Terminal(self._write)
        self.out, self.err = (TerminalStream(self.terminal, "[0] ", drops_notices) for _ in range(2))

    def _write(self, text: str) -> None:
        self._written += text

    def new(self) -> str:
        written, self._written = self._written, ""
        return written

    def of(self, text: str) -> str:
        self.out.feed(text.encode())
        return self.new()


def test_each_line_has_a_mark() -> None:
    shown = Shown()
    assert shown.of("a\nb") == "[0] a\n[0] b"
    assert shown.of("c\n\n") == "c\n[0]\n"
    assert shown.of("d\r") == "[0] d"
    assert shown.of("\ne\n") == "\n[0] e\n"


def test_a_bar_is_written_over_itself() -> None:
    shown = Shown()
    assert shown.of("\r1/2 [=>.]") == "[0] 1/2 [=>.]"
    # As Keras does: back over the bar, which has no mark for it, then to the begin of the line.
    assert shown.of("\b" * 9 + "\r2/2 [==]\n") == "\b" * 9 + "\r[0] 2/2 [==]\n"


def test_a_line_of_another_rank_stands_above_the_bar() -> None:
    shown = Shown()
    shown.of("1/2 [=>.]")
    shown.terminal.show("[1] hello")
    assert shown.new() == f"{CLEAR}[1] hello\n[0] 1/2 [=>.]"
    # The cursor is at the begin of the line again where it was.
    assert shown.of("\r-") == "\r[0] -"
    assert shown.of("1/2 [=>.]\r\x1b[2K") == "1/2 [=>.]\r\x1b[2K"
    shown.terminal.show("[1] more")
    assert shown.new() == f"{CLEAR}[1] more\n[0] -1/2 [=>.]\r"
    assert shown.of("2/2 [==]\n") == "[0] 2/2 [==]\n"
    shown.terminal.show("[1] end")
    assert shown.new() == "[1] end\n"


def test_two_outputs_do_not_share_a_line() -> None:
    shown = Shown()
    shown.of("begun")
    shown.err.feed(b"error\n")
    assert shown.new() == "\n[0] error\n"
    assert shown.of("gone on\n") == "[0] gone on\n"


def test_colors_come_after_the_mark_and_other_sequences_before() -> None:
    shown = Shown()
    assert shown.of("\x1b[32mgreen\x1b[0m\n") == "[0] \x1b[32mgreen\x1b[0m\n"
    assert shown.of("\r\x1b[2K\x1b[1Aup") == "\x1b[2K\x1b[1A[0] up"


def test_a_sequence_may_come_in_two_pieces() -> None:
    shown = Shown()
    assert shown.of("a\x1b[3") == "[0] a"
    assert shown.of("2mb\n") == "\x1b[32mb\n"


def test_notices_are_left_out() -> None:
    notice = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
    shown = Shown()
    assert shown.of(f"{notice[:20]}") == ""
    assert shown.of(f"{notice[20:]}\nother\n") == "[0] other\n"
    assert shown.of("WARNING: All is lost\n") == "[0] WARNING: All is lost\n"
    shown.of("WARNING: All log")
    shown.out.end()
    assert shown.new() == "[0] WARNING: All log\n"
    assert Shown(drops_notices=False).of(f"{notice}\n") == f"[0] {notice}\n"


def test_the_end_ends_the_line_and_shows_the_cursor() -> None:
    shown = Shown()
    shown.of("\x1b[?25lhalf a line")
    shown.out.end()
    assert shown.new() == "\n\x1b[?25h"

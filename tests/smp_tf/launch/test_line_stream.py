"""Lines made of what processes write bit by bit: progress bars, backspaces, characters cut in two."""

from __future__ import annotations

from smp_tf.launch.line_stream import LineStream


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(*pieces: str) -> list[str]:
    stream = LineStream()
    found = [line for piece in pieces for line in stream.lines(piece.encode())]
    return [*found, *stream.rest()]


def test_lines_are_whole() -> None:
    assert lines_of("a\nb", "c\n", "\nd") == ["a", "bc", "", "d"]
    assert lines_of("a\r\n", "b\r", "\nc\n") == ["a", "b", "c"]
    assert lines_of("") == []


def test_a_character_may_come_in_two_pieces() -> None:
    stream = LineStream()
    first, second = "ä\n".encode()[:1], "ä\n".encode()[1:]
    assert [*stream.lines(first), *stream.lines(second)] == ["ä"]
    assert [*stream.lines(b"\xff\n")] == ["�"]


def test_progress_makes_a_line_every_few_seconds_and_its_last_state() -> None:
    clock = Clock()
    stream = LineStream(5.0, clock)
    found = []
    for step in range(1, 101):
        clock.now += 0.125
        found += list(stream.lines(f"\r{step}/100".encode()))
    found += list(stream.lines(b"\nnext\n"))
    assert found == ["1/100", "41/100", "81/100", "100/100", "next"]


def test_the_bar_of_keras_is_a_line() -> None:
    bar, moves = "1/2 [==>..] - loss: 1.5", "\b" * 23 + "\r"
    last = "2/2 [=====] - loss: 1.0"
    assert lines_of(f"Epoch 1/1\n\r{bar}", f"{moves}{last}\n") == ["Epoch 1/1", bar, last]
    # Also where the carriage return is left out.
    assert lines_of("12\b\b34\n") == ["34"]


def test_what_only_moves_the_cursor_is_not_in_lines() -> None:
    bar = "\x1b[?25l\r\x1b[2K\x1b[32m10%\x1b[0m"
    assert lines_of(bar, "\r\x1b[2K\x1b[1A\x1b[2K\x1b[32m20%\x1b[0m\n\x1b[?25h") == [
        "\x1b[32m10%\x1b[0m",
        "\x1b[32m20%\x1b[0m",
    ]


def test_a_line_that_a_carriage_return_has_left_is_kept() -> None:
    assert lines_of("50%\r") == ["50%"]
    assert lines_of("50%\r\n") == ["50%"]
    assert lines_of("50%\r\rdone\n") == ["50%", "done"]

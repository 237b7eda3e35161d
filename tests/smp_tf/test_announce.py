"""What the user should know is said once, on rank 0."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

import pytest

from smp_tf import announce as announce_module
from smp_tf.announce import announce, tell, tell_in_time
from tests.ops.rank_fleet import full_stderr


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce_module, "_said", set())


def test_a_text_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("One thing.", "Another.", "One thing."):
        announce(text, 0)
    assert capsys.readouterr() == ("", "smp_tf: One thing.\nsmp_tf: Another.\n")


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    announce("One thing.", 1)
    assert capsys.readouterr() == ("", "")
    announce("One thing.", 0)
    assert capsys.readouterr().err == "smp_tf: One thing.\n"


def test_lines_of_one_thread_are_not_torn_by_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []

    class Stream:
        def write(self, text: str) -> None:
            pieces.append(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Stream())
    tell("A table\nof two lines.")
    assert pieces == ["A table\nof two lines.\n"]


def test_control_characters_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    tell("one\n\ttwo\x1b[2J\r\x9b\x7f, Größe")
    assert capsys.readouterr().err == "one\n\ttwo\\x1b[2J\\x0d\\x9b\\x7f, Größe\n"


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


def on_a_full_disk() -> TextIO:
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")


@pytest.mark.parametrize("stream", [lambda: None, closed, on_a_full_disk], ids=["none", "closed", "on a full disk"])
def test_a_standard_error_that_takes_nothing_is_no_error(
    stream: Callable[[], TextIO | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`smp.init` failed with an AttributeError where a script was started without one."""
    monkeypatch.setattr(sys, "stderr", stream())
    tell("One thing.")
    tell_in_time("Another.")


@pytest.mark.parametrize("kind", ["blocking", "nonblocking"])
def test_who_must_go_on_does_not_wait_for_a_reader(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce_module, "_PRINTING_TIME", 0.05)
    reading, writing = full_stderr(kind)
    stream = os.fdopen(writing, "w", closefd=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "__stderr__", stream)
    tell_in_time("One thing.")
    # Who reads late still reads it.
    with os.fdopen(reading, "rb") as pipe:
        while (line := pipe.readline()) == b"\n":
            pass
    assert line == b"One thing.\n"
    os.close(writing)


@pytest.mark.parametrize("has_room", [True, False])
def test_where_no_thread_can_be_started_words_are_said_if_they_have_room(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What should have been said ended the thread that said it, with a RuntimeError."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(announce_module, "_PRINTING_TIME", 0.05)
    monkeypatch.setattr(threading.Thread, "start", start)
    reading, writing = os.pipe() if has_room else full_stderr("blocking")
    stream = os.fdopen(writing, "w", closefd=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "__stderr__", stream)
    tell_in_time("One thing.")
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read().strip() == (b"One thing." if has_room else b"")

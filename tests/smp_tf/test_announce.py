"""What the user should know is said once, on rank 0."""

from __future__ import annotations

import sys

import pytest

from smp_tf import announce as announce_module
from smp_tf.announce import announce, tell


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

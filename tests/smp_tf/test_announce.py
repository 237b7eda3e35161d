"""What the user should know is said once, on rank 0."""

from __future__ import annotations

import pytest

from smp_tf import announce as announce_module
from smp_tf.announce import announce


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

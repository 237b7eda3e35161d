"""What the tests of the benchmarks share: their modules are found as when a script runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

#: A benchmark, options, and words of why they are not taken.
Refuse = Callable[[str, Sequence[str], str], None]
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def beside_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of a script are found beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Asserts that a benchmark does not take options, and says why in some words."""

    def options_are_refused(benchmark: str, options: Sequence[str], words: str) -> None:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(benchmark).arguments(options)
        assert ended.value.code == 2
        # Lines are broken where they are long.
        assert words in " ".join(capsys.readouterr().err.split())

    return options_are_refused

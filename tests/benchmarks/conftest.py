"""What the tests of the benchmarks share: their modules are found as when a script runs."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def beside_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of a script are found beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

"""The benchmark of the first step: how growth is told, and a run on a model of next to no size."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rich.console import Console

from tests.benchmarks.conftest import Refuse
from tests.partition.plan.test_report import cells

PARTS = {"trace": 1.0, "plan": 0.5, "build": 0.25, "graph": 0.125, "run": 0.125}


def printed(table: Any) -> list[list[str]]:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return cells(capture.get())


def test_growth_is_an_exponent() -> None:
    from harness.report import exponent

    assert exponent((2, 3.0), (8, 12.0)) == pytest.approx(1.0)
    assert exponent((2, 3.0), (8, 48.0)) == pytest.approx(2.0)
    assert exponent((2, 3.0), (8, 3.0)) == 0.0
    assert math.isnan(exponent((2, 0.0), (8, 3.0)))


def test_the_table_has_medians_the_spread_and_how_each_part_grows() -> None:
    from start_time import Start, table_of

    small = [Start({**PARTS, "trace": trace}, plain=1.0, step=0.01) for trace in (1.0, 3.0, 0.5)]
    large = [Start({**PARTS, "trace": 4.0, "plan": 8.0}, plain=10.0, step=0.02)]
    rows = printed(table_of("layers", {6: small, 24: large}, "about"))
    assert rows == [
        ["6", "1.00", "0.50", "0.25", "0.12", "0.12", "2.00", "1.50 – 4.00", "2.00", "10.0"],
        ["24", "4.00", "8.00", "0.25", "0.12", "0.12", "12.50", "12.50 – 12.50", "1.25", "20.0"],
        ["grows as", "1.00", "2.00", "0.00", "0.00", "0.00", "1.32", "", "", ""],
    ]


def test_a_size_may_differ_from_one_that_has_a_name() -> None:
    from models.gpt import SIZES, size_of

    assert size_of("tiny") == SIZES["tiny"]
    assert (size_of("tiny+depth=24+batch=64").depth, size_of("tiny+depth=24+batch=64").width) == (24, 16)
    for name in ("huge", "tiny+deep=3", "tiny+depth", "tiny+depth=many"):
        with pytest.raises(ValueError, match="A size is one of tiny"):
            size_of(name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--axes width", "axes are layers"),
        ("--layers 4,2", "expected rising numbers"),
        ("--microbatches 3,8", "have to divide it"),
        ("--size huge", "A size is one of tiny"),
        ("--json no/such/folder/file", "in a folder that is there"),
    ],
)
def test_bad_options_are_told(refuse: Refuse, options: str, words: str) -> None:
    refuse("start_time", options.split(), words)

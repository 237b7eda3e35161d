"""The benchmark of the first step: how growth is told, and a run on a model of next to no size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.distributed.harness import launch_script
from tests.partition.test_report import cells

PARTS = {"trace": 1.0, "plan": 0.5, "build": 0.25, "graph": 0.125, "run": 0.125}


def printed(table: Any) -> list[list[str]]:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return cells(capture.get())


def test_growth_is_an_exponent() -> None:
    from report import exponent

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
    from gpt import SIZES, size_of

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
def test_bad_options_are_told(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from start_time import arguments

    with pytest.raises(SystemExit) as ended:
        arguments(options.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_plain_keras_is_started_once_for_all_points_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import start_time

    asked: list[str] = []

    def first(
        way: str, size: str, microbatches: int, processes: int, given: object, *, steps: int
    ) -> tuple[dict[str, float], float]:
        asked.append(f"{way} {size} {microbatches} {processes}")
        return dict.fromkeys(start_time.PARTS.values(), 0.5), 0.01

    monkeypatch.setattr(start_time, "first_step", first)
    given = start_time.arguments(["--microbatches", "1,8", "--layers", "2,4", "--repetitions", "2"])
    found = start_time.run(given, "microbatches", lambda text: None)
    once = ["a tiny+depth=8+batch=8 1 1", "c tiny+depth=8+batch=8 1 2", "c tiny+depth=8+batch=8 8 2"]
    assert asked == once * 2
    assert {value: [start.of_plain for start in starts] for value, starts in found.items()} == {1: [1, 1], 8: [1, 1]}
    del asked[:]
    start_time.run(given, "layers", lambda text: None)
    assert [line.split("+")[1] for line in asked if line.startswith("a")] == ["depth=2", "depth=4"] * 2


@pytest.mark.distributed
@pytest.mark.full
def test_a_run_writes_every_start_down(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = f"--axes microbatches --microbatches 1,8 --repetitions 1 --json {out}".split()
    ran = launch_script(1, "benchmarks/start_time.py", options, launched=False).expect_clean()
    assert "grows as" in ran.output(0)
    found = json.loads(out.read_text())["starts"]["microbatches"]
    assert {value: len(starts) for value, starts in found.items()} == {"1": 1, "8": 1}
    for [start] in found.values():
        assert start["step"] < start["parts"]["trace"] < sum(start["parts"].values())

"""The benchmark of the number of microbatches: its table, its options, and a run on a model of next to no size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.test_start_time import printed
from tests.distributed.harness import launch_script

FOUND = {
    "proposed": 2,
    "best": 4,
    "rows": [
        {
            "microbatches": count,
            "foreseen": foreseen,
            "seconds": {"median": median, "quartiles": [median - 0.01, median + 0.01]},
            "over_taken": {"median": median / 0.4, "quartiles": [1.0, 1.5]},
        }
        for count, foreseen, median in ((2, 0.5, 0.4), (4, 0.75, 0.3))
    ],
}


def test_the_table_has_what_was_foreseen_beside_what_was_measured() -> None:
    from microbatches import table_of

    assert printed(table_of(FOUND, "about")) == [
        ["2", "500.0", "1.00", "400.0 (390.0 – 410.0)", "1.00 (1.00 – 1.50)", "proposed"],
        ["4", "750.0", "1.50", "300.0 (290.0 – 310.0)", "0.75 (1.00 – 1.50)", "measured best"],
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--microbatches", "2,64"], "--microbatches are from 1 to 32"),
        (["--profiled", "2,64"], "--profiled are from 1 to 32"),
        (["--profiled", "4"], "one size says nothing of another"),
        (["--profiled", "17,20"], "one size says nothing of another"),
        (["--microbatches", "some"], "expected rising numbers from 1 on, such as 1,2,4. Received: some"),
        (["--size", "huge"], "Received: huge"),
    ],
)
def test_bad_options_are_told(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from microbatches import arguments

    with pytest.raises(SystemExit) as ended:
        arguments(options)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_what_is_not_given_fits_the_batch() -> None:
    from microbatches import arguments

    for options, compared, measured in (
        ([], [1, 2, 4, 8, 16, 32], [1, 4, 32]),
        (["--size", "tiny"], [1, 2, 4, 8], [1, 4, 8]),
        (["--size", "tiny+batch=3"], [1, 2], [1, 3]),
    ):
        given = arguments(options)
        assert (given.microbatches, given.profiled) == (compared, measured)


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("size", ["tiny", "conv-tiny"])
def test_a_run_writes_every_turn_down(tmp_path: Path, size: str) -> None:
    out = tmp_path / "out"
    options = f"--size {size} --microbatches 1,4 --profiled 1,8 --repetitions 2 --turn 0.1 --json {out}".split()
    ran = launch_script(1, "benchmarks/microbatches.py", options, launched=False).expect_clean()
    assert "proposed" in ran.output(0)
    found = json.loads(out.read_text())
    assert [row["microbatches"] for row in found["rows"]] == [1, 4]
    assert all(len(row["seconds"]["all"]) == 2 and row["foreseen"] > 0 for row in found["rows"])
    assert found["proposed"] in (1, 4)

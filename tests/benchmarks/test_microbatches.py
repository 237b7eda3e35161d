"""The benchmark of the number of microbatches: its table, its options, and a run on a model of next to no size."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import Refuse
from tests.benchmarks.test_start_time import printed

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
def test_bad_options_are_told(refuse: Refuse, options: list[str], words: str) -> None:
    refuse("microbatches", options, words)

"""A loss that is not the one of the whole batch, over all replicas, is refused on every rank with the same words."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult

CASES = "tests.distributed.cases.loss_check"
STAGES = {"partitions": 2, "microbatches": 4, "seed": 1}
GRID = {"partitions": 2, "microbatches": 2, "seed": 1}
REPLICAS = {"partitions": 1, "microbatches": 1, "seed": 1}


def launched(size: int, name: str, config: dict[str, int], **arguments: object) -> LaunchedCase:
    return LaunchedCase(size, CASES, Case(name, "refusal", arguments, config))


#: What is launched, and what every rank says.
REFUSED = [
    (
        launched(2, "rooted over unlike replicas", REPLICAS, loss="rooted", pads=True),
        "for the whole batch of 16 samples, and",
    ),
    (
        launched(2, "sum over unlike replicas", REPLICAS, loss="sum", pads=True),
        "as the average over its 2 microbatches. It is the sum",
    ),
    (
        launched(4, "mask on a grid, unlike", GRID, loss="positives", pads=True),
        "as the average over its 4 microbatches. It is divided by",
    ),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("launched", "words"), REFUSED)
def test_another_loss_is_refused_on_every_rank(case_result: CaseResult, words: str) -> None:
    said = list(case_result.values())
    assert len(set(said)) == 1
    assert words in said[0]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [launched(2, "scaled", STAGES, loss="mean", optimizer="late_scaling")])
def test_an_optimizer_that_scales_by_the_gradients_of_its_stage_is_refused(case_result: CaseResult) -> None:
    for said, weights in zip(case_result.values(), ("'dense/", "'dense_1/"), strict=True):
        assert "The apply_gradients that the script has for LateScaling makes something else of the gradients" in said
        assert weights in said


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [launched(2, "mean", STAGES, loss="mean"), launched(4, "mean", GRID, loss="mean")])
def test_an_average_over_samples_trains(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {""}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "launched",
    [
        LaunchedCase(4, CASES, Case(name, "brought", {"of_all_replicas": name == "of all"}, GRID))
        for name in ("of all", "of one")
    ],
)
def test_what_ranks_have_kept_comes_to_one(case_result: CaseResult, launched: LaunchedCase) -> None:
    first = [[[0.0], [0.0, 0.0]], [[1.0], [1.0, 1.0]], 0, [0.0, 0.0]]
    second = [[[10.0], [10.0, 10.0]], [[11.0], [11.0, 11.0]], 1, [1.0, 1.0]]
    of_all = [None, [first, second], None, None]
    assert list(case_result.values()) == (of_all if launched.case.name == "of all" else [None, [first], None, [second]])

"""Normalizations that ask for moments over all processes take those of plain Keras on the union of the replicas."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult
from tests.full_only import params

CASES = "tests.distributed.cases.synchronized_moments"
#: Samples in the batches of two replicas, by step.
EQUAL = [[8, 8]] * 3
UNEQUAL = [[8, 6], [5, 9]]
FEWER = [[8, 8], [3, 6], [5, 1]]


def over(partitions: int, microbatches: int, norm: str = "keras", loop: str = "step", **more: object) -> LaunchedCase:
    """A case on two replicas."""
    sizes = more.pop("sizes", EQUAL)
    config = {"partitions": partitions, "microbatches": microbatches, "seed": 1, **more}
    what = {id(EQUAL): "equal", id(UNEQUAL): "unequal", id(FEWER): "fewer"}[id(sizes)]
    name = " ".join(map(str, [partitions, microbatches, norm, loop, what, *more.values()]))
    arguments = {"norm": norm, "loop": loop, "sizes": sizes}
    return LaunchedCase(2 * partitions, CASES, Case(name, "trained", arguments, config))


BY_DEFAULT = [
    over(1, 4, sizes=FEWER),
    over(2, 2, "horovod", "fit", pipeline="interleaved"),
]
GRID = [
    over(1, 1),
    over(1, 2, "horovod", "fit"),
    over(2, 2, pipeline="interleaved"),
    over(1, 4, sizes=UNEQUAL),
    over(1, 2, "older", "train_on_batch"),
    over(1, 2, recompute=True),
    *(over(2, 4, pipeline=pipeline) for pipeline in ("simple", "zb_h1", "interleaved_1f1b", "zb_v")),
    over(2, 3, "horovod", pipeline="zb_h1", sizes=FEWER),
    over(2, 2, loop="fit", recompute=True, pipeline="zb_h1"),
    over(3, 2, sizes=UNEQUAL),
    over(3, 3, "horovod", "train_on_batch", pipeline="zb_h1"),
]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params([*BY_DEFAULT, *GRID], GRID))
def test_a_training_is_that_of_plain_keras_on_the_union_of_the_replicas(case_result: CaseResult) -> None:
    assert max(case_result.values()) < 1e-9

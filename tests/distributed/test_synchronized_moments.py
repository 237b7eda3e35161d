"""Normalizations that ask for moments over all processes take those of plain Keras on the union of the replicas."""

from __future__ import annotations

import re

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult, Outcome, launch_script
from tests.full_only import params

CASES = "tests.distributed.cases.synchronized_moments"
#: Samples in the batches of two replicas, by step.
EQUAL = [[8, 8]] * 3
UNEQUAL = [[8, 6], [5, 9]]
FEWER = [[8, 8], [3, 6], [5, 1]]
ONE_STEP = [[8, 8]]


def over(partitions: int, microbatches: int, norm: str = "keras", loop: str = "step", **more: object) -> LaunchedCase:
    """A case on two replicas."""
    sizes = more.pop("sizes", EQUAL)
    besides = {key: more.pop(key) for key in ("loss", "policy") if key in more}
    config = {"partitions": partitions, "microbatches": microbatches, "seed": 1, **more}
    what = {id(EQUAL): "equal", id(UNEQUAL): "unequal", id(FEWER): "fewer", id(ONE_STEP): "one step"}[id(sizes)]
    name = " ".join(map(str, [partitions, microbatches, norm, loop, what, *besides.values(), *more.values()]))
    arguments = {"norm": norm, "loop": loop, "sizes": sizes, **besides}
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
    over(1, 2, loop="fit", loss="in_batch_softmax"),
    over(1, 2, xla=True, sizes=UNEQUAL),
    over(1, 2, loop="whole batch", loss="in_batch_softmax", sizes=UNEQUAL),
    over(2, 2, loop="fit", loss="in_batch_softmax", sizes=UNEQUAL),
]
#: Products of short floats differ with the number of samples, and soon the training.
SHORT = [
    over(1, 2, sizes=ONE_STEP, policy="mixed_bfloat16"),
    over(2, 2, loop="fit", sizes=ONE_STEP, policy="mixed_bfloat16"),
]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params([*BY_DEFAULT, *GRID], GRID))
def test_a_training_is_that_of_plain_keras_on_the_union_of_the_replicas(case_result: CaseResult) -> None:
    assert max(case_result.values()) < 1e-9


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("launched", SHORT)
def test_with_short_floats_too_as_far_as_they_go(case_result: CaseResult) -> None:
    assert max(case_result.values()) < 0.03


OF_THREE = LaunchedCase(3, CASES, Case("bits", "moving_averages", {}, {"partitions": 1, "microbatches": 2, "seed": 1}))


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("launched", [OF_THREE])
def test_moving_averages_have_the_same_bits_on_all_replicas(case_result: CaseResult) -> None:
    first, *others = case_result.values()
    assert len(first) == 6
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert one.tobytes() == same.tobytes()


def ended(mode: str) -> Outcome:
    outcome = launch_script(2, "tests/distributed/scripts/synchronized_moments.py", (mode,))
    assert not outcome.timed_out, outcome.report()
    assert outcome.left_behind == [], outcome.report()
    assert outcome.returncode != 0, outcome.report()
    return outcome


@pytest.mark.distributed
@pytest.mark.full
def test_a_replica_that_ends_before_the_others_is_named() -> None:
    """Also where the step takes no gradients, which replicas average."""
    outcome = ended("leave")
    assert re.search(r"rank 1 \(host .*\) left the loop early after step 1", outcome.output(0)), outcome.report()


@pytest.mark.distributed
@pytest.mark.full
def test_replicas_that_wait_for_moments_of_different_steps_are_named() -> None:
    outcome = ended("apart")
    said = (
        r"The ranks are in different steps and wait for each other: rank \d .* is in step 2 of '(one|other)' on .* and "
        r"waits for 'moments of batch_normalization' from rank \d; rank \d .* is in step 2 of '(one|other)'"
    )
    assert re.search(said, "\n".join(line.text for line in outcome.lines)), outcome.report()

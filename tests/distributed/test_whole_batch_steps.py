"""Over stages, too, `@smp.step(whole_batch=True)` gives what one process computes of the whole batch."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult
from tests.full_only import params

CASES = "tests.distributed.cases.whole_batch_steps"
STAGES = {"partitions": 2, "microbatches": 4, "seed": 1}


def trained(
    loss: str, use: str, *, eager: bool = False, replicas: int = 1, most: int = 5, **config: object
) -> LaunchedCase:
    whole = {**STAGES, **config}
    way = "eager" if eager else "graph"
    compiled = " xla" if whole.get("xla") else ""
    name = f"{loss} {use} {way} {whole['partitions']}x{replicas} {whole['microbatches']}{compiled}"
    partitions = whole["partitions"]
    assert isinstance(partitions, int)
    arguments = {"loss": loss, "use": use, "eager": eager, "most": most}
    return LaunchedCase(partitions * replicas, CASES, Case(name, "trained", arguments, whole))


TRAINED = [
    trained("total", "clipped_and_logged"),
    trained("in_batch_softmax", "in_two_rounds", eager=True),
    trained("mean", "logged", microbatches=1),
    trained("detection", "of_all_in_a_row"),
    trained("over_sixteen", "adaptive", eager=True),
    trained("weighted_sum", "signed_roots"),
    trained("dice", "clipped_and_logged", partitions=3, microbatches=8),
    LaunchedCase(2, CASES, Case("penalty", "with_penalty", {}, STAGES)),
    *(LaunchedCase(2, CASES, Case(f"counted {m}", "counted", {}, {**STAGES, "microbatches": m})) for m in (1, 4)),
    *(trained("total", "scaled_by_the_loss", pipeline=pipeline) for pipeline in ("simple", "zb_h1")),
]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params(TRAINED, TRAINED[2:]))
def test_loops_of_a_script_train_as_one_process(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {True}


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("launched", [LaunchedCase(2, CASES, Case("local outputs", "local_outputs", {}, STAGES))])
def test_local_outputs_stay_on_their_stage(case_result: CaseResult) -> None:
    found = list(case_result.values())
    assert [each["is local"] for each in found] == [False, True]
    assert all(each["is right"] for each in found)


REPLICAS = {**STAGES, "partitions": 1}


def on_replicas(function: str, replicas: int = 2, name: str = "", **arguments: object) -> LaunchedCase:
    """A case on replicas of one partition."""
    return LaunchedCase(replicas, CASES, Case(name or f"replicas, {function}", function, arguments, REPLICAS))


OF_REPLICAS = [
    trained("of_few", "clipped_and_logged", replicas=2, partitions=1, most=2),
    trained("in_batch_softmax", "clipped_and_logged", replicas=2, partitions=1, eager=True),
    trained("in_batch_softmax", "logged", replicas=2, partitions=1, microbatches=2),
    trained("mean", "scaled_by_the_loss", replicas=2, partitions=1, microbatches=1),
    trained("of_positives", "adaptive", replicas=2, partitions=1, eager=True),
    trained("mean", "logged", replicas=2, partitions=1, eager=True, microbatches=2),
    trained("detection", "clipped_and_logged", replicas=2, partitions=2),
    trained("dice", "in_two_rounds", replicas=2, partitions=2, shard_optimizer_state=True),
    trained("total", "clipped_and_logged", replicas=2, partitions=2, pipeline="zb_h1", eager=True),
    trained("weighted_sum", "of_all_in_a_row", replicas=2, partitions=2, pipeline="simple", microbatches=3),
    *(
        trained(loss, use, replicas=3, partitions=1, microbatches=2, eager=eager)
        for loss, use, eager in (
            ("of_positives", "clipped_and_logged", True),
            ("in_batch_softmax", "logged", False),
            ("total", "in_two_rounds", False),
        )
    ),
    on_replicas("with_penalty"),
    on_replicas("of_two_forms"),
    on_replicas("counted"),
    on_replicas("called_twice"),
]


#: Compiled by XLA.
COMPILED = [
    trained("total", "clipped_and_logged", replicas=2, partitions=1, xla=True, microbatches=2, eager=True),
    trained("in_batch_softmax", "logged", replicas=2, partitions=1, xla=True, microbatches=2),
    trained("of_positives", "in_two_rounds", partitions=2, xla=True, microbatches=2),
]


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("launched", COMPILED)
def test_loops_that_xla_compiles_train_as_one_process(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {True}


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params(OF_REPLICAS, OF_REPLICAS[1:]))
def test_loops_train_as_one_process_on_the_batches_of_all_replicas(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {True}


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("launched", [on_replicas("other_axis")])
def test_samples_of_all_replicas_may_lie_along_another_axis(case_result: CaseResult) -> None:
    for found in case_result.values():
        assert found == [True] * 10


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("launched", [on_replicas("sized")])
def test_a_step_that_needs_its_size_is_told_where_it_changes(case_result: CaseResult) -> None:
    for eager, graph, words in case_result.values():
        assert (eager, graph) == (True, True)
        assert "must add up to as many samples as in the first step" in words


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize(
    ("launched", "words"),
    [
        (on_replicas("refused", name="ragged", what="ragged"), "ragged, sparse or text arguments of several replicas"),
        (on_replicas("refused", name="unlike", what="unlike"), "Pad the batches of all replicas to one length"),
    ],
)
def test_batches_that_cannot_be_joined_are_refused_in_words(case_result: CaseResult, words: str) -> None:
    assert all(words in told for told in case_result.values())

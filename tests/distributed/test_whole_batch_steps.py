"""Over stages, too, `@smp.step(whole_batch=True)` gives what one process computes of the whole batch."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult
from tests.full_only import params

CASES = "tests.distributed.cases.whole_batch_steps"
STAGES = {"partitions": 2, "microbatches": 4, "seed": 1}


def trained(loss: str, use: str, *, eager: bool = False, **config: object) -> LaunchedCase:
    whole = {**STAGES, **config}
    way = "eager" if eager else "graph"
    name = f"{loss} {use} {way} {whole['partitions']} {whole['microbatches']}"
    processes = whole["partitions"]
    assert isinstance(processes, int)
    return LaunchedCase(processes, CASES, Case(name, "trained", {"loss": loss, "use": use, "eager": eager}, whole))


TRAINED = [
    trained("total", "clipped_and_logged"),
    trained("in_batch_softmax", "in_two_rounds", eager=True),
    trained("mean", "logged", microbatches=1),
    trained("detection", "of_all_in_a_row"),
    trained("over_sixteen", "adaptive", eager=True),
    trained("weighted_sum", "signed_roots"),
    trained("dice", "clipped_and_logged", partitions=3, microbatches=8),
    LaunchedCase(2, CASES, Case("penalty", "with_penalty", {}, STAGES)),
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


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize(
    "launched", [LaunchedCase(2, CASES, Case("replicas", "replicas", {}, {**STAGES, "partitions": 1}))]
)
def test_several_replicas_are_refused_in_words(case_result: CaseResult) -> None:
    for words in case_result.values():
        assert "has whole_batch=True, which takes one replica. Received: 2 replicas" in words

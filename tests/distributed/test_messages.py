"""Few, small messages: what one step sends, counted and measured by the transport."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult

M = 4
CONFIG = {"partitions": 3, "microbatches": M, "check_inputs": False, "seed": 1}
CASES = "tests.distributed.cases.messages"
# Samples per microbatch x width x bytes of a float32.
NARROW, WIDE = 4 * 8 * 4, 4 * 16 * 4
LOSS = 4


def case(name: str) -> LaunchedCase:
    return LaunchedCase(3, CASES, Case(name, name, {}, CONFIG))


def edges(result: CaseResult) -> list[list[tuple[int, float, int]]]:
    """Per rank: peer, messages per step, bytes per message, of every edge it sends on."""
    return [sorted((edge["to"], edge["messages"], edge["bytes"]) for edge in rank["edges"]) for rank in result.values()]


@pytest.mark.parametrize("launched", [case("chain")], ids=["chain"])
def test_a_chain_sends_one_activation_forward_and_one_gradient_back(
    case_result: CaseResult,
) -> None:
    # Also the loss, which every rank gets. The constants of the layers cross nowhere.
    assert edges(case_result) == [
        [(1, M, WIDE)],
        [(0, M, WIDE), (2, M, WIDE)],
        [(0, M, LOSS), (1, M, LOSS), (1, M, WIDE)],
    ]


@pytest.mark.parametrize("launched", [case("skip")], ids=["skip"])
def test_a_tensor_goes_once_to_each_stage_and_its_gradients_are_summed_on_the_way(
    case_result: CaseResult,
) -> None:
    # Stage 0's output goes to stages 1 and 2 once each, though stage 2 uses it twice. Its gradient
    # from stage 2, one sum, joins that of stage 1, and stage 0 gets one tensor.
    assert edges(case_result) == [
        [(1, M, WIDE), (2, M, WIDE)],
        [(0, M, WIDE), (2, M, NARROW)],
        [(0, M, LOSS), (1, M, LOSS), (1, M, NARROW), (1, M, WIDE)],
    ]


@pytest.mark.parametrize("launched", [case("tied")], ids=["tied"])
def test_a_tied_weight_crosses_once_per_step_and_its_gradient_once(case_result: CaseResult) -> None:
    # The table is stored on stage 0 and used on stage 2 as well: to there goes its value, back comes its gradient.
    table = 19 * 16 * 4
    assert edges(case_result) == [
        [(1, M, WIDE), (2, 1, table)],
        [(0, M, WIDE), (2, M, WIDE)],
        [(0, 1, table), (0, M, LOSS), (1, M, LOSS), (1, M, WIDE)],
    ]


@pytest.mark.parametrize("launched", [case("tied_embedding")], ids=["tied_embedding"])
def test_a_gpts_tied_embedding_crosses_as_often(case_result: CaseResult) -> None:
    embedding = 19 * 16 * 8
    sent = edges(case_result)
    once = [(rank, *edge) for rank, of_rank in enumerate(sent) for edge in of_rank if edge[1] != M]
    assert once == [(0, 2, 1, embedding), (2, 0, 1, embedding)]
    assert sum(size == embedding for of_rank in sent for _, _, size in of_rank) == len(once)

"""Ranks, groups, seeds, messages and agreements on real processes."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult

CASES = "tests.distributed.cases.ranks"
TWO = {"partitions": 2, "microbatches": 2}


def on(size: int, name: str, function: str, config: dict[str, object] | None = None) -> LaunchedCase:
    return LaunchedCase(size, CASES, Case(name, function, {}, config or TWO))


@pytest.mark.parametrize("launched", [on(4, "cluster", "numbers")], ids=["4"])
def test_ranks_cluster(case_result: CaseResult) -> None:
    ranks = case_result.values()
    assert [rank["world"] for rank in ranks] == [[r, 4, r, 4] for r in range(4)]
    assert [rank["mp"] for rank in ranks] == [
        [0, 2, [0, 1]],
        [1, 2, [0, 1]],
        [0, 2, [2, 3]],
        [1, 2, [2, 3]],
    ]
    assert [rank["dp"] for rank in ranks] == [
        [0, 2, [0, 2]],
        [0, 2, [1, 3]],
        [1, 2, [0, 2]],
        [1, 2, [1, 3]],
    ]
    assert ranks[3]["rest"] == [1, 2, 0, 1, 1]


@pytest.mark.parametrize("launched", [on(4, "spread", "numbers", {**TWO, "placement_strategy": "spread"})], ids=["4"])
def test_ranks_spread(case_result: CaseResult) -> None:
    ranks = case_result.values()
    assert [rank["mp"][0] for rank in ranks] == [0, 0, 1, 1]
    assert [rank["dp"][0] for rank in ranks] == [0, 1, 0, 1]
    assert ranks[0]["mp"][2] == [0, 2]


@pytest.mark.parametrize("launched", [on(4, "reduce", "reduce_over_groups")], ids=["4"])
def test_each_group_has_a_process_set_of_its_own(case_result: CaseResult) -> None:
    ranks = case_result.values()
    assert [int(rank["mp"]) for rank in ranks] == [11, 11, 1100, 1100]
    assert [int(rank["dp"]) for rank in ranks] == [101, 1010, 101, 1010]


@pytest.mark.parametrize("launched", [on(2, "reduce", "reduce_over_groups", {"partitions": 1})], ids=["2"])
def test_a_group_of_all_is_horovods_own_and_a_group_of_one_has_none(
    case_result: CaseResult,
) -> None:
    ranks = case_result.values()
    assert [rank["mp"] for rank in ranks] == [None, None]
    assert [int(rank["dp"]) for rank in ranks] == [11, 11]


@pytest.mark.parametrize("launched", [on(2, "seeds", "draw")], ids=["2"])
def test_ranks_draw_alike_without_a_seed(case_result: CaseResult) -> None:
    first, second = case_result.values()
    assert first == second


@pytest.mark.parametrize("launched", [on(4, "objects", "exchange_objects")], ids=["4"])
def test_objects(case_result: CaseResult) -> None:
    ranks = case_result.values()
    for rank, value in enumerate(ranks):
        groups = {kind: [said["rank"] for said in value["gathered"][kind]] for kind in value["gathered"]}
        replica, stage = (rank // 2) * 2, rank % 2
        assert groups == {
            "WORLD": [0, 1, 2, 3],
            "MP_GROUP": [replica, replica + 1],
            "PP_GROUP": [replica, replica + 1],
            "DP_GROUP": [stage, stage + 2],
            "RDP_GROUP": [stage, stage + 2],
            "TP_GROUP": [rank],
        }
    words, array, first, count = ranks[3]["received"]
    assert (words, array.tolist(), first, count) == ("to all", [0, 1, 2], "first to 3", 5_000_000)
    assert [rank["answer"] for rank in ranks] == [None, "replica 0", None, "replica 1"]


@pytest.mark.parametrize("launched", [on(2, "refused", "refused_messages")], ids=["2"])
def test_messages_that_cannot_be(case_result: CaseResult) -> None:
    refused = case_result.values()[0]
    assert refused["unpicklable"].startswith("MessageError: An object of type function cannot be")
    assert refused["itself"].startswith("MessageError: A rank cannot send to itself: WORLD_RANK 0")
    assert refused["nobody"].startswith("ValueError: There is no WORLD_RANK 99")
    assert refused["group"].startswith("TypeError: A group is one of smp.WORLD, ")
    assert refused["rank type"].startswith("TypeError: rank_type is one of smp.RankType.WORLD_RANK")


@pytest.mark.parametrize("launched", [on(4, "agreements", "agreements")], ids=["4"])
def test_agreements(case_result: CaseResult) -> None:
    for rank, value in enumerate(case_result.values()):
        assert value["gathered"] == [[0], [1], [2], [3]]
        assert value["told"] == {"from": 1}
        assert value["some"] == [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
        assert value["equal"] == "None"
        lines = value["differ"].splitlines()
        assert lines[0] == "The ranks do not agree on the shape:"
        assert lines[1].startswith("  x[1]: rank 3 (host ")
        assert lines[1].endswith("has 4; ranks 0, 1 and 2 have 3")
        assert "The ranks are at different places of the script: rank 0 (" in value["astray"]
        assert "is at 'there'" in value["astray"]
        assert value["after"] == [1, 1, 1, 1]


@pytest.mark.parametrize("launched", [on(2, "too late", "too_late")], ids=["2"])
def test_a_rank_that_does_not_come_is_named(case_result: CaseResult) -> None:
    first, last = case_result.values()
    assert first["words"].startswith("rank 1 (host ")
    assert "did not come to a meeting within 0 s, while other ranks waited" in first["words"]
    assert last["words"] == "late"


@pytest.mark.parametrize("launched", [on(2, "again", "initialise_again")], ids=["2"])
def test_init_again(case_result: CaseResult) -> None:
    ranks = case_result.values()
    for rank in ranks:
        assert "microbatches (2 now, 4 asked)" in rank["refused"]
        assert "smp.shutdown()" in rank["refused"]
        assert rank["seen"][:4] == [False, True, 2, [0, 1]]
        assert rank["mp_size"] == 2
    # random.seed(5); random.random()
    assert ranks[0]["seen"][4]["python"] == 0.6229016948897019
    assert ranks[0]["seen"][4] == ranks[1]["seen"][4]

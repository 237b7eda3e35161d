"""What a rank proposes: here, which schedule."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import cast

import pytest

from smp_tf.errors import MemoryLimitError, PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.place.trade import Offer, Trade
from smp_tf.partition.plan.plan import Plan
from smp_tf.pipeline.planner import memory_forecast, proposal
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.proposal import _best_of
from smp_tf.pipeline.planner.request import Aim, Course, Fixed, Hardware, PlacementRequest, Storage
from smp_tf.pipeline.schedules.schedule import IN_ORDER
from tests.partition.op_graph_builder import chain_of_dense

GRAPH = chain_of_dense(8, batch=16)


def request(schedule: str, stages: int, microbatches: int, limit: float | None = None) -> PlacementRequest:
    ranks = Ranks.alike(stages, limit)
    return PlacementRequest(
        Course(schedule, stages, microbatches), Storage(0.0), Aim("memory"), hardware=Hardware(ranks)
    )


def proposed(graph: OpGraph, schedule: str, stages: int, microbatches: int, limit: float | None = None) -> Plan:
    return proposal.propose(graph, request(schedule, stages, microbatches, limit), {})


def needed(schedule: str, stages: int, microbatches: int) -> int:
    plan = proposed(GRAPH, schedule, stages, microbatches)
    asked = request(schedule, stages, microbatches)
    exact = memory_forecast.with_exact_transfers(plan, cut(GRAPH, plan), asked)
    return max(row.stored_bytes for row in exact.forecast)


def test_the_fastest_schedule_is_taken_and_the_others_are_told() -> None:
    plan = proposed(GRAPH, "auto", 2, 4)
    assert plan.schedule == "zb_h1"
    others = "interleaved takes 28%, simple takes 12%, interleaved_1f1b takes 23%, zb_v takes 16%".replace(
        "%", "% longer"
    )
    assert plan.reasons[-1] == f"schedule zb_h1: {others}"
    assert dataclasses.replace(plan, reasons=()) == dataclasses.replace(proposed(GRAPH, "zb_h1", 2, 4), reasons=())


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 8), (4, 1)])
def test_where_all_are_the_same_the_first_is_taken_without_a_word(stages: int, microbatches: int) -> None:
    plan = proposed(GRAPH, "auto", stages, microbatches)
    assert (plan.schedule, plan.reasons) == ("interleaved", ())


def test_what_does_not_fit_is_not_taken() -> None:
    sizes = {kind: needed(kind, 4, 8) for kind in IN_ORDER}
    assert sizes["interleaved"] < sizes["zb_h1"] < sizes["simple"]
    plan = proposed(GRAPH, "auto", 4, 8, sizes["interleaved"])
    assert plan.schedule == "interleaved"
    others = [kind for kind in IN_ORDER if kind != "interleaved"]
    assert plan.reasons[-1] == f"schedule interleaved: {', '.join(f'{kind} does not fit' for kind in others)}"
    # Half the stash of ZB-H1's is less than ZB-H1's, and a little faster here.
    assert needed("v_half", 4, 8) < sizes["zb_h1"]
    assert proposed(GRAPH, "auto", 4, 8, sizes["zb_h1"]).schedule == "v_half"
    assert proposed(GRAPH, "auto", 4, 8, needed("v_half", 4, 8) - 1).schedule == "v_min"


def test_where_none_fits_the_error_is_that_of_the_leanest() -> None:
    with pytest.raises(MemoryLimitError) as auto:
        proposed(GRAPH, "auto", 4, 8, 5000.0)
    with pytest.raises(MemoryLimitError) as interleaved:
        proposed(GRAPH, "interleaved", 4, 8, 5000.0)
    assert str(auto.value) == str(interleaved.value)


def test_schedules_with_several_chunks_want_as_many_layers() -> None:
    plan = proposed(chain_of_dense(3, batch=16), "auto", 2, 4)
    assert plan.reasons[-1].startswith("schedule zb_h1: ")
    assert "zb_v" not in plan.reasons[-1]


def both_ends_share(layers: int) -> OpGraph:
    """Dense layers, the first and the last of which have one kernel."""
    return chain_of_dense(layers, width=64, batch=8, tied=(0, layers - 1))


def not_contiguous(graph: OpGraph, schedule: str = "interleaved", **options: object) -> Plan:
    request = PlacementRequest(Course(schedule, 3, 4, contiguous=False, **options), Storage(2.0), Aim("memory"))
    return proposal.propose(graph, request, {})


def test_a_stage_has_both_ends_where_they_share_a_weight_and_that_is_better() -> None:
    graph = both_ends_share(4)
    plan = not_contiguous(graph)
    assert plan.placement == (0, 1, 2, 0)
    assert plan.stage_of("net/dense_0") == plan.stage_of("net/dense_3") == 0
    assert [shared.copies for shared in plan.shared] == [()]
    assert plan.reasons[-1].startswith("stage 0 has two runs of the layers, both ends of the model")
    assert proposed(graph, "interleaved", 3, 4).placement == (0, 1, 2)


def test_where_it_gains_nothing_every_stage_is_one_run() -> None:
    plan = not_contiguous(GRAPH)
    assert plan.has_one_chunk_each
    assert plan.reasons[-1] == "no stage is visited more often than the schedule asks for: that would gain nothing"


def test_stages_are_folded_where_that_evens_them_out() -> None:
    """Of shapes with a stage that is visited again one was tried, that with both ends on one stage."""
    plan = not_contiguous(both_ends_share(6))
    assert plan.placement == (0, 1, 2, 1, 0)
    assert plan.stage_of("net/dense_0") == plan.stage_of("net/dense_5") == 0
    assert plan.reasons[-1].startswith("all stages but the last have two runs of the layers, there and back: ")


def test_a_schedule_with_chunks_of_its_own_keeps_them() -> None:
    assert not_contiguous(both_ends_share(6), "zb_v").placement == (0, 1, 2, 2, 1, 0)


def test_too_few_layers_for_any_schedule_is_an_error_that_says_so() -> None:
    """Bug: an IndexError, on one rank."""
    request = PlacementRequest(Course("auto", 2, 4, chunks_per_rank=5), Storage(0.0), Aim("memory"))
    with pytest.raises(PlacementError, match=r"has 8 units .* one in each of its 10 chunks on 2 partitions"):
        proposal.propose(GRAPH, request, {})


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v", "auto"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_partition_that_there_is_not_is_named(schedule: str, contiguous: bool) -> None:
    """Bug: an IndexError where a partition may be visited more than once."""
    graph = chain_of_dense(8, batch=16, stages=[0, 0, 1, 1, 5, 0, 0, 0])
    request = PlacementRequest(Course(schedule, 2, 4, contiguous=contiguous), Storage(0.0), Aim("memory"))
    with pytest.raises(PlacementError, match=r"'net/dense_4' was placed on partition 5. There are 2: use 0 to 1"):
        proposal.propose(graph, request, {})


def test_layers_by_hand_go_with_the_chunks_of_the_schedule_where_these_come_back() -> None:
    """Bug: contiguous = false refused what contiguous = true takes."""
    graph = chain_of_dense(8, batch=16, stages=[0, 0, 1, 1, 1, 1, 0, 0])
    for contiguous in (True, False):
        request = PlacementRequest(Course("zb_v", 2, 4, contiguous=contiguous), Storage(0.0), Aim("memory"))
        assert proposal.propose(graph, request, {}).placement == (0, 1, 1, 0)
    request = PlacementRequest(Course("interleaved", 2, 4, contiguous=False), Storage(0.0), Aim("memory"))
    plan = proposal.propose(graph, request, {})
    assert plan.placement == (0, 1, 0)
    assert [plan.stage_of(f"net/dense_{layer}") for layer in range(8)] == [0, 0, 1, 1, 1, 1, 0, 0]


def test_a_later_step_may_use_the_layers_of_one_partition_alone() -> None:
    """Bug: with auto_partition = false it was refused, since no layer was on the other partition."""
    graph = chain_of_dense(2, batch=16, stages=[0, 0])
    request = PlacementRequest(Course("interleaved", 2, 4), Storage(0.0), Aim("memory"), fixed=Fixed(default=0))
    with pytest.raises(PlacementError, match="no layer is on partition 1 of 2"):
        proposal.propose(graph, request, {})
    assert set(proposal.propose(graph, request, {0: 0, 1: 0}).units.values()) == {0}


class TestSmallerMicrobatches:
    """A step is traced for one size of them, and what would fit with smaller ones was not said in a training."""

    def said(self, limit: float, schedule: str = "interleaved", samples: int = 64) -> str:
        asked = request(schedule, 2, 2, limit).changed(samples=samples)
        with pytest.raises(MemoryLimitError) as raised:
            proposal.propose(chain_of_dense(8, batch=samples), asked, {})
        return str(raised.value).splitlines()[-1]

    def needed(self, microbatches: int, samples: int, schedule: str = "interleaved") -> int:
        graph = chain_of_dense(8, batch=samples)
        asked = request(schedule, 2, microbatches).changed(samples=samples)
        plan = proposal.propose(graph, asked, {})
        exact = memory_forecast.with_exact_transfers(plan, cut(graph, plan), asked)
        return max(row.device_bytes for row in exact.forecast)

    def test_as_many_as_would_do_are_named(self) -> None:
        for limit, many in ((25_000.0, 4), (17_200.0, 4), (12_200.0, 8)):
            assert f"about {many} microbatches; " in self.said(limit)
            assert self.needed(many, 128 // many) <= limit

    def test_where_all_are_kept_more_of_them_do_not_help(self) -> None:
        assert "microbatches" not in self.said(26_000.0, "simple")

    def test_a_batch_has_a_sample_for_each(self) -> None:
        assert "microbatches" not in self.said(1_000.0)


def of_shape(balanced: float, taken: float, sent: float) -> Plan:
    """A plan that has given up some balance."""
    trade = Trade(0.05, Offer(balanced, 100.0, 1.0), Offer(taken, sent, 1.0), Offer(taken, sent, 1.0))
    return cast(Plan, SimpleNamespace(trade=trade))


@pytest.mark.parametrize(
    ("plans", "scores", "tolerance", "wanted"),
    [
        # The second shape has a better balance, and the first one is too far from it to send less.
        ([of_shape(100, 104, 10), of_shape(90, 94, 20)], [104, 94], 0.05, 1),
        # It is near enough.
        ([of_shape(92, 94, 10), of_shape(90, 94, 20)], [94, 94], 0.05, 0),
        # Of equal bytes the better score.
        ([of_shape(92, 94, 20), of_shape(90, 93, 20)], [94, 93], 0.05, 1),
        # Scores are those of plans that are cut, and may all be beyond what the best balance allows.
        ([of_shape(90, 95, 10), of_shape(90, 94.9, 20)], [99, 98], 0.05, 1),
        # Without a tolerance: the simplest shape within 1 % of the best score.
        ([of_shape(90, 90, 30), of_shape(90, 90, 10)], [90.8, 90], 0.0, 0),
        ([of_shape(90, 90, 30), of_shape(90, 90, 10)], [91.0, 90], 0.0, 1),
        # So it is where one of the plans leaves no choice.
        ([of_shape(90, 90, 30), cast(Plan, SimpleNamespace(trade=None))], [90.8, 90], 0.05, 0),
    ],
)
def test_of_shapes_that_are_nearly_as_good_the_one_that_sends_least(
    plans: list[Plan], scores: list[float], tolerance: float, wanted: int
) -> None:
    assert _best_of(plans, scores, tolerance) == wanted

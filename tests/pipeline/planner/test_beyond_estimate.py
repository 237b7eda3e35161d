"""What units were seen to need while they run takes the place of what was estimated."""

from __future__ import annotations

import pytest

from smp_tf.partition.errors import MemoryLimitError
from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.plan.held_memory import HeldMemory
from smp_tf.partition.plan.stage_forecast import Source, StageForecast, Use
from smp_tf.pipeline.planner.beyond_estimate import beyond_estimate, by_node
from smp_tf.pipeline.planner.counted_memory import exact_and_counted
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.memory_forecast import with_exact_transfers
from smp_tf.pipeline.planner.proposal import propose
from smp_tf.pipeline.planner.request import Aim, Course, PlacementRequest, Storage
from smp_tf.pipeline.planner.unit_peaks import BeyondEstimate, UnitPeaks
from tests.partition.op_graph_builder import chain_of_dense

MIB = 2**20
#: Two dense layers and a loss of 512 KiB each, in a step whose kernels take 4 MiB.
GRAPH = chain_of_dense(2, width=1024, batch=128)
REQUEST = PlacementRequest(Course("simple", 2, 2), Storage(slots=0.0), Aim("memory"))
#: Forward a product whose memory the activation takes over, and the loss; backward the gradients of the output, the
#: kernel and, of the second layer, the input.
ESTIMATED = {"net/dense_0": (MIB // 2, 9 * MIB // 2), "net/dense_1": (MIB // 2 + 4, 5 * MIB)}


def forecasts(beyond: BeyondEstimate) -> tuple[StageForecast, ...]:
    """The memory forecast of two stages with a layer each."""
    asked = REQUEST.changed(beyond=beyond)
    plan = propose(GRAPH, asked, {})
    return with_exact_transfers(plan, cut(GRAPH, plan), asked).forecast


def test_what_units_have_beyond_their_estimates_is_told_forward_and_backward() -> None:
    seen = UnitPeaks({name: (2 * MIB, 4 * MIB) for name in ESTIMATED}, 0)
    assert beyond_estimate(GRAPH, seen, 1) == {
        name: (2 * MIB - forward, 4 * MIB - backward) for name, (forward, backward) in ESTIMATED.items()
    }
    # Of a unit that was not measured nothing is told, and of no unit where nothing was counted.
    assert list(beyond_estimate(GRAPH, UnitPeaks({"net/dense_1": (0, 0), "net/other": (0, 0)}, 0), 1)) == [
        "net/dense_1"
    ]
    assert beyond_estimate(GRAPH, UnitPeaks(), 1) == {}


def test_tensors_that_are_not_counted_are_not_estimated_either() -> None:
    seen = UnitPeaks(dict.fromkeys(ESTIMATED, (0, 0)), MIB)
    # Only the gradient of a kernel is as large.
    assert beyond_estimate(GRAPH, seen, 1) == dict.fromkeys(ESTIMATED, (0, -4 * MIB))


def test_a_stage_needs_as_much_more_while_its_unit_runs() -> None:
    plain = forecasts(BeyondEstimate())
    more = forecasts(by_node(GRAPH, {"net/dense_0": (0, 7 * MIB), "net/dense_1": (0, 0)}))
    grown = [after.memory.total - before.memory.total for before, after in zip(plain, more, strict=True)]
    # With the part that the allocator hands out beyond what it is asked for.
    assert 7 * MIB <= grown[0] <= 7 * MIB * 15 / 14 + 1
    assert grown[1] == 0
    assert [row.memory[Use.STASH] for row in more] == [row.memory[Use.STASH] for row in plain]


def test_a_stage_goes_by_a_profile_where_all_its_units_were_measured() -> None:
    assert [row.source for row in forecasts(BeyondEstimate())] == [Source.ESTIMATE] * 2
    assert [row.source for row in forecasts(by_node(GRAPH, {"net/dense_0": (0, 0)}))] == ["by profile", "estimated"]
    assert [row.source for row in forecasts(by_node(GRAPH, dict.fromkeys(ESTIMATED, (0, 0))))] == ["by profile"] * 2


def test_a_stage_that_ran_before_holds_what_it_held() -> None:
    plan = propose(GRAPH, REQUEST, {})
    held = (HeldMemory(90 * MIB, 0, 1000, 80 * MIB), HeldMemory(70 * MIB, 0, 2000, 60 * MIB))
    asked = REQUEST.changed(held={"another": held[:1] * 2, plan.placement_key: held})
    again = propose(GRAPH, asked, {})
    assert (again.units, again.earlier) == (plan.units, held)
    exact, counted = exact_and_counted(again, cut(GRAPH, again), asked)
    assert [row.device_bytes for row in exact.forecast] == [90 * MIB + 1000, 70 * MIB + 2000]
    assert [row.source for row in exact.forecast] == ["as measured"] * 2
    assert counted == (90 * MIB, 70 * MIB)
    # A limit is kept by what was held.
    with pytest.raises(MemoryLimitError, match=r"90\.0 MiB"):
        propose(GRAPH, asked.changed(ranks=Ranks.alike(2, 85 * MIB)), {})


def test_the_loss_of_a_step_is_none_of_what_was_measured() -> None:
    beyond = by_node(GRAPH, dict.fromkeys(ESTIMATED, (1, 2)))
    ops = {node.name: node.op for node in GRAPH.nodes}
    assert {ops[name] for name in beyond.nodes} == {"MatMul", "Relu", "ReluGrad"} | (
        {ops[name] for name in beyond.nodes} & {"ReadVariableOp"}
    )
    assert sorted({*beyond.nodes.values()}) == [1, 2]

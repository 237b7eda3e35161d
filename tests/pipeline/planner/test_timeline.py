"""The time of a step, from one place: units, averages over replicas, sums over stages, updates and checks in it."""

from __future__ import annotations

from typing import Any

import pytest

from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.units.cost import Machine
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.proposal import propose
from smp_tf.pipeline.planner.request import Aim, Course, Hardware, PlacementRequest, Storage
from smp_tf.pipeline.planner.timeline import timeline_of
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from smp_tf.pipeline.planner.units import costs_of, units_of
from smp_tf.pipeline.programs.simulate import SimulatedStep
from smp_tf.pipeline.programs.text import parse
from tests.partition.op_graph_builder import chain_of_dense

GRAPH = chain_of_dense(4)
#: Four layers of 8 x 8 weights, 256 bytes each. Forward takes one second, backward two. Messages go at 64 bytes a
#: second, 128 bytes a second are read or written, and to start an op takes half a second.
REQUEST = PlacementRequest(
    Course("simple", 2, 2),
    Storage(slots=2.0),
    Aim("speed"),
    UnitTimes({unit.name: (1.0, 2.0) for unit in units_of(GRAPH)}),
    Hardware(Ranks.alike(2), Machine(1.0, memory=128.0, link=64.0, op_seconds=0.5)),
)
#: When the last backward pass ends: two messages of 2 seconds are on the way of the first microbatch.
COMPUTED = 22.0
#: Two layers on each stage: their gradients, weights twice and both slots twice.
UPDATE = 7 * 512 / 128


def simulated(**changes: Any) -> SimulatedStep:
    request = REQUEST.changed(**changes)
    plan = propose(GRAPH, request, {})
    return timeline_of(plan, *costs_of(GRAPH, request, plan), cut(GRAPH, plan), request)


def test_one_replica_computes_and_updates() -> None:
    found = simulated()
    assert (found.computed, found.step_time) == (COMPUTED, COMPUTED + UPDATE)
    assert [str(task) for task in found.program.ranks[0][-2:]] == ["0B1", "0APPLY"]


def test_replicas_average_before_they_update() -> None:
    found = simulated(replicas=2)
    # Half of 512 bytes is sent, and received again.
    assert (found.computed, found.step_time) == (COMPUTED, COMPUTED + 512 / 64 + UPDATE)
    four = simulated(replicas=4)
    assert four.step_time == COMPUTED + 1.5 * 512 / 64 + UPDATE
    assert four.span_of(parse("1WEIGH")).end == 6 * 0.5


def test_an_average_begins_after_its_wait() -> None:
    found = simulated(replicas=2, sum_wait=3.0)
    assert found.step_time == COMPUTED + 3.0 + 512 / 64 + UPDATE


def test_a_slower_ring_is_in_the_time() -> None:
    ranks = Ranks((1.0, 1.0), (1.0, 1.0), (None, None), rings=(0.5, 1.0))
    found = simulated(replicas=2, ranks=ranks)
    assert found.step_time == COMPUTED + 2 * 512 / 64 + UPDATE
    assert found.span_of(parse("1REDUCE0")).end == 16.0 + 512 / 64


def test_stages_sum_before_they_update() -> None:
    plain, summed = simulated(replicas=2), simulated(replicas=2, stage_sums=1)
    # The first stage takes two messages for the only other one, which takes half a second more to have its answer.
    assert summed.span_of(parse("0SUM")).end == COMPUTED + 512 / 64 + 1.0
    assert summed.step_time == plain.step_time + 1.0 + 0.5


def test_a_check_of_batches_costs_its_share_of_a_step_and_holds_nobody_up() -> None:
    found = simulated(checks_inputs=True)
    assert found.step_time == simulated().step_time
    # Of the batch 256 bytes are read, on one step of a hundred.
    assert found.span_of(parse("1CHECK")).end == pytest.approx(256 / 128 / 100)


def test_shared_slots_are_updated_in_parts() -> None:
    assert simulated(replicas=2, slot_shares=2).step_time == COMPUTED + 512 / 64 + UPDATE / 2 + 512 / 2 / 64

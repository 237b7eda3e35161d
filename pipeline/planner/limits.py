"""Compares plans with the limits of ranks, after the step is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.memory_limit import excess
from smp_tf.partition.plan.plan import Plan
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.memory_forecast import with_exact_transfers
from smp_tf.pipeline.planner.plan import planned
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.schedules.schedule import LEAN, placement_of, runs_on


def with_less(request: PlacementRequest, less: Sequence[float]) -> PlacementRequest:
    """Returns the request with narrower limits.

    Args:
        request: has limits.
        less: for each stage, the bytes by which its limit is narrower.
    """
    assert request.hardware.ranks is not None
    memory = tuple(
        None if limit is None else limit - part for limit, part in zip(request.hardware.ranks.memory, less, strict=True)
    )
    return request.changed(ranks=dataclasses.replace(request.hardware.ranks, memory=memory))


def without_limits(request: PlacementRequest) -> PlacementRequest:
    """Returns the request without its limits.

    Args:
        request: has limits.
    """
    assert request.hardware.ranks is not None
    ranks = dataclasses.replace(request.hardware.ranks, memory=(None,) * request.course.stages)
    return request.changed(ranks=ranks)


def smallest_of(request: PlacementRequest) -> PlacementRequest:
    """Returns the request for the placement with the least memory, without limits.

    Args:
        request: has limits.
    """
    return without_limits(request).changed(objective="memory", balance_tolerance=0.0)


def as_cut(graph: OpGraph, request: PlacementRequest, plan: Plan) -> Plan:
    """Returns the plan with the memory that its cut really needs.

    Args:
        graph: the pruned op graph of a step.
        request: the request that the plan was made for.
        plan: the plan.
    """
    done = cut(graph, plan, request.outputs.local, request.outputs.composites)
    return with_exact_transfers(plan, done, request)


def is_possible(kind: str, request: PlacementRequest, units: int) -> bool:
    """Returns whether a schedule is possible with the chunks that are asked for.

    Args:
        kind: the schedule.
        request: the request.
        units: number of units of the model.
    """
    course = request.course
    if kind in LEAN and all(limit is None for limit in request.limits):
        return False
    if course.placement is not None:
        return runs_on(kind, course.placement)
    try:
        return len(placement_of(kind, course.stages, course.chunks_per_rank)) <= max(units, course.stages)
    except ScheduleError:
        return False


def fits(graph: OpGraph, request: PlacementRequest) -> bool:
    """Returns whether the placement with the least memory keeps within the limits.

    Args:
        graph: the pruned op graph of a step.
        request: has limits.
    """
    try:
        smallest = planned(graph, smallest_of(request), {})
    except PlacementError:
        return False
    return excess(as_cut(graph, request, smallest), request.limits) <= 0

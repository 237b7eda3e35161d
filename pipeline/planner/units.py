"""Returns the units of a step, and what each costs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from smp_tf.partition.graph.graph_facts import graph_fact
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.units.cost import Costs, Machine, MessageCost, estimate, with_measured
from smp_tf.partition.units.recompute import group_units, with_recompute
from smp_tf.partition.units.units import AFTER_MODEL, Unit, build_units
from smp_tf.pipeline.planner.request import PlacementRequest


@graph_fact
def units_of(graph: OpGraph) -> tuple[Unit, ...]:
    """Returns the units to place. The loss is part of the last one, since it is no stage of its own.

    Args:
        graph: the pruned op graph of a step.
    """
    units = build_units(graph)
    if len(units) < 2 or units[-1].name != AFTER_MODEL:
        return units
    *others, last, after = units
    joined = dataclasses.replace(
        last,
        nodes=tuple(sorted(last.nodes + after.nodes)),
        backward=tuple(sorted(last.backward + after.backward)),
        variables=tuple(sorted({*last.variables, *after.variables})),
    )
    return (*others, joined)


def costs_of(graph: OpGraph, request: PlacementRequest, plan: Plan | None = None) -> tuple[tuple[Unit, ...], Costs]:
    """Returns the units of a step, and what each costs for one microbatch.

    Args:
        graph: the pruned op graph.
        request: what the costs depend on besides.
        plan: the plan of the step, which says what backward makes again; None while there is none.
    """
    units = units_of(graph)
    groups = tuple(plan.recompute.get(unit.name) for unit in units) if plan is not None else None
    return units, costs_in_order(graph, units, request, groups)[0]


def costs_in_order(
    graph: OpGraph,
    units: Sequence[Unit],
    request: PlacementRequest,
    groups: tuple[int | None, ...] | None = None,
) -> tuple[Costs, int]:
    """Returns the costs, and how many of the units were measured.

    Args:
        graph: the pruned op graph.
        units: units of the step, in an order.
        request: what the costs depend on besides.
        groups: the group of every unit that backward makes again; None where this is not decided.
    """
    costs = estimate(
        graph,
        units,
        # While it is not decided which variables a stage gets, shares count as equal.
        slots=request.storage.slots / request.storage.slot_shares,
        microbatches=request.course.microbatches,
        machine=_machine_of(request),
        unknown=request.course.samples,
    )
    costs = costs.on_host(gradients=request.storage.gradients_on_host, slots=request.storage.slots_on_host)
    costs, known = with_measured(costs, units, request.times.seconds, request.times.alone)
    if request.course.recompute and graph.gradients:
        groups = groups or group_units(costs, max(request.course.chunks.in_flight) / request.course.stages)
        costs = with_recompute(costs, graph, units, groups)
    return costs, known


def _machine_of(request: PlacementRequest) -> Machine | None:
    """Returns the speeds that costs go by. Messages between hosts do not cost what those within one do."""
    machine, message, ranks = request.hardware.machine, request.times.message, request.hardware.ranks
    if message is None or (ranks is not None and len(set(ranks.hosts)) > 1):
        return machine
    return dataclasses.replace(machine or Machine(), message=MessageCost(*message))


def pins(units: Sequence[Unit], owners: Mapping[int, int]) -> list[int | None]:
    """Returns the chunk that owns each unit's variables, where an earlier step decided it.

    A variable that several units use pins none of them. A chunk that does not own it reads it remotely, as in the step
    that decided.
    """
    users = Counter(v for unit in units for v in unit.variables)
    return [max((owners[v] for v in unit.variables if v in owners and users[v] == 1), default=None) for unit in units]

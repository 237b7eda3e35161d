"""Cuts a step as a plan says, or into its units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.layout import Layout
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.split.assign import assign
from smp_tf.partition.split.split import Split
from smp_tf.partition.split.splitter import split
from smp_tf.partition.split.sums import sum_before_sending
from smp_tf.partition.units.recompute import groups_of_nodes
from smp_tf.partition.units.units import Unit
from smp_tf.pipeline.planner.units import units_of
from smp_tf.pipeline.schedules.schedule import program_of
from smp_tf.pipeline.task import Kind


def cut_into_units(graph: OpGraph) -> tuple[tuple[Unit, ...], Split]:
    """Returns the units of a step, and the step cut so that each of them is a stage of its own.

    Args:
        graph: the pruned op graph.

    Raises:
        PlacementError: the cut goes through something that cannot be cut.
    """
    units = units_of(graph)
    stage_of = {number: unit.index for unit in units for number in unit.nodes}
    return units, split(assign(graph, len(units), stage_of))


def cut(
    graph: OpGraph,
    plan: Plan,
    local_outputs: frozenset[int] = frozenset(),
    composites: Sequence[tuple[int, ...]] = (),
    layouts: Mapping[str, Layout] | None = None,
) -> Split:
    """Cuts a step as a plan says.

    Args:
        graph: the pruned op graph.
        plan: the plan, which says where units and variables go.
        local_outputs: positions of outputs that stay with the stage that makes them.
        composites: positions of outputs that are parts of one composite tensor.
        layouts: of variables, by name; the value of those that have none here is whole on every rank of the stage.

    Returns:
        The segments and transfers of all stages.
    """
    units = units_of(graph)
    chunks = plan.chunks_of(units)
    chunk_of = {number: chunks[unit.index] for unit in units for number in unit.nodes}
    owners = {v.index: plan.owners[v.name] for v in graph.variables if v.name in plan.owners}
    count, placement = len(plan.placement), plan.placement
    recompute = groups_of_nodes(units, [plan.recompute.get(unit.name) for unit in units])
    assignment = assign(graph, count, chunk_of, owners, placement)
    summed = sum_before_sending(assignment)
    if summed is not graph:
        # Nodes were added. Those of units are found again by their unique names.
        at = {node.name: number for number, node in enumerate(summed.nodes)}
        chunk_of = {at[graph.nodes[number].name]: chunk for number, chunk in chunk_of.items()}
        recompute = {at[graph.nodes[number].name]: group for number, group in recompute.items()}
        assignment = assign(summed, count, chunk_of, owners, placement)
    program = program_of(plan.schedule, placement, plan.microbatches)
    in_two = {task.chunk for tasks in program for task in tasks if task.kind is Kind.W}
    in_parts = {name for name, layout in (layouts or {}).items() if not layout.has_whole_value}
    gathered = [variable.index for variable in graph.variables if variable.name in in_parts]
    return split(assignment, local_outputs, composites, cut_backward=in_two, recompute=recompute, gathered=gathered)

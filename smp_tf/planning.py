"""From a traced step to a cut one: decide who owns what, once per model, and cut every later step accordingly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smp_tf.partition.assign import assign
from smp_tf.partition.cost import estimate
from smp_tf.partition.op_graph import OpGraph
from smp_tf.partition.solve_chain import Chain, solve_chain
from smp_tf.partition.split import Split, split
from smp_tf.partition.sums import sum_before_sending
from smp_tf.partition.units import build_units
from smp_tf.pipeline.schedule import in_flight


@dataclass(frozen=True)
class PlacementRequest:
    """What the placement of a step depends on besides its graph.

    Args:
        stages: number of stages.
        microbatches: number of microbatches.
        schedule: name of the schedule.
        objective: "memory" or "speed".
        slots: optimizer slots per trainable variable, in sizes of the variable.
    """

    stages: int
    microbatches: int
    schedule: str
    objective: str
    slots: float


def prune(graph: OpGraph) -> OpGraph:
    """The graph without the ops that neither an output nor an effect needs."""
    wanted = [t.node for t in graph.outputs] + [n for n, node in enumerate(graph.nodes) if node.stateful]
    return graph.subgraph(graph.ancestors(wanted))


def place_units(graph: OpGraph, request: PlacementRequest) -> tuple[dict[int, int], dict[int, int]]:
    """Place the units of a model over the stages.

    Args:
        graph: the pruned op graph of a training step.
        request: how many stages, and what to balance.

    Returns:
        Stage of every forward node that belongs to a unit, and the owner stage of every variable that units use.

    Raises:
        PlacementError: the model has too few units, or does not fit.
    """
    units = build_units(graph)
    costs = estimate(graph, units, slots=request.slots, microbatches=request.microbatches)
    chain = Chain.of([u.name for u in units], [u.stage for u in units], costs)
    solution = solve_chain(
        chain,
        request.stages,
        objective=request.objective,
        microbatches=request.microbatches,
        in_flight=in_flight(request.schedule, request.stages, request.microbatches),
    )
    stage_of = {number: solution.stage_of[unit.index] for unit in units for number in unit.nodes}
    return stage_of, dict(solution.owners)


def cut(
    graph: OpGraph,
    stages: int,
    stage_of: Mapping[int, int],
    owners: Mapping[int, int],
    local_outputs: frozenset[int] = frozenset(),
    composites: Sequence[tuple[int, ...]] = (),
) -> Split:
    """Cut a step whose units are placed."""
    assignment = assign(graph, stages, stage_of, owners)
    summed = sum_before_sending(assignment)
    if summed is not graph:
        # Nodes were added: units are found again by name, which is unique.
        names = {graph.nodes[number].name: stage for number, stage in stage_of.items()}
        again = {number: names[node.name] for number, node in enumerate(summed.nodes) if node.name in names}
        assignment = assign(summed, stages, again, owners)
    return split(assignment, local_outputs, composites)

"""Takes the placement that a plan file gives, without a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.place.placement import Chain, Chunks, Placement
from smp_tf.partition.place.solve_chain import follow_owners
from smp_tf.partition.plan.plan_file import StoredPlan
from smp_tf.partition.units.cost import Costs
from smp_tf.partition.units.units import Unit
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.planner.units import pins

#: How many layers that were moved by hand are named.
_MOST_MOVED = 8


def as_given(
    graph: OpGraph,
    units: Sequence[Unit],
    costs: Costs,
    given: StoredPlan,
    request: PlacementRequest,
    owners: Mapping[int, int],
) -> Placement:
    """Returns the placement of a plan file, which names all of the units in order.

    Args:
        graph: the pruned op graph of a step.
        units: its units, in the order of the file.
        costs: costs of the units.
        given: the plan of the file.
        request: what else the placement depends on.
        owners: chunk of variables whose owner an earlier step decided, by index.

    Raises:
        PlacementError: an earlier step or the script contradicts the file, or a partition is left without a layer.
    """
    chunks, ranks = request.course.chunks, request.hardware.ranks
    placed = [given.units[unit.name] for unit in units]
    _require_same_places(units, placed, given, chunks, owners)
    empty = sorted(set(range(request.course.stages)) - {chunks.placement[chunk] for chunk in placed})
    if empty and not owners:
        raise PlacementError(
            f"The plan that was loaded puts no layer on partition {', '.join(map(str, empty))} of "
            f"{request.course.stages}. Every partition needs one."
        )
    decided = _owners_given(graph, costs, placed, given, chunks, owners)
    chain = Chain.of([unit.name for unit in units], costs, pinned=placed)
    return follow_owners(chain, request.course.stages, decided, request.course.microbatches, chunks, ranks)


def _require_same_places(
    units: Sequence[Unit], placed: Sequence[int], given: StoredPlan, chunks: Chunks, owners: Mapping[int, int]
) -> None:
    """Raises an error where an earlier step or the script places units elsewhere than the file does."""
    if chunks.placement != given.placement:
        raise PlacementError(
            f"The plan that was loaded has chunks on partitions {list(given.placement)}, and what an earlier step "
            f"placed is in chunks on partitions {list(chunks.placement)}: change one of the two plans in the file."
        )
    for unit, chunk, pin in zip(units, placed, pins(units, owners), strict=True):
        stage = chunks.placement[chunk]
        if pin not in (None, chunk):
            raise PlacementError(
                f"The plan that was loaded puts {unit.name!r} on partition {stage}. An earlier step put its variables "
                f"on partition {chunks.placement[pin]}, where they stay: change one of the two plans in the file."
            )
        if unit.stage not in (None, stage):
            raise PlacementError(
                f"The plan that was loaded puts {unit.name!r} on partition {stage}, and smp.partition in the script on "
                f"{unit.stage}. Change one of them, or make the plan anew."
            )


def _owners_given(
    graph: OpGraph,
    costs: Costs,
    placed: Sequence[int],
    given: StoredPlan,
    chunks: Chunks,
    owners: Mapping[int, int],
) -> dict[int, int]:
    """Returns the chunks of variables that several units use, by earlier steps and the file."""
    decided = dict(owners)
    for weight in costs.weights:
        name = graph.variables[weight.variable].name
        used_on = sorted({placed[user] for user in weight.users})
        if len(used_on) < 2:
            continue
        if weight.variable not in decided:
            decided[weight.variable] = given.shared.get(name, used_on[0])
            if decided[weight.variable] not in used_on:
                stages = sorted({chunks.placement[chunk] for chunk in used_on})
                raise PlacementError(
                    f"The plan that was loaded gives {name!r} to partition "
                    f"{chunks.placement[decided[weight.variable]]}, whose layers do not use it. Those of partitions "
                    f"{' and '.join(map(str, stages))} do."
                )
        stage = chunks.placement[decided[weight.variable]]
        asked = chunks.placement[given.shared.get(name, decided[weight.variable])]
        if asked != stage:
            raise PlacementError(
                f"The plan that was loaded gives {name!r} to partition {asked}. An earlier step put it on partition "
                f"{stage}, where it stays: change one of the two plans in the file."
            )
    return decided


def loaded(given: StoredPlan, own: str) -> str:
    """Returns a sentence that a plan was loaded, whether it is of another step, and what was moved by hand.

    Args:
        given: the plan.
        own: the fingerprint of the step that uses it.
    """
    said = "the placement is that of the plan that was loaded"
    if given.fingerprint != own:
        said += f", which was made for step {given.step!r} with other batches, constants or operations"
    moved = given.moved()
    if not moved:
        return said
    more = f", and {len(moved) - _MOST_MOVED} more" if len(moved) > _MOST_MOVED else ""
    return f"{said}; moved by hand: {', '.join(moved[:_MOST_MOVED])}{more}"

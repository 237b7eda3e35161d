"""Places the units of a step, by what is known before the step is cut.

Ownership is decided once per model, by the first step that uses it. A later step (evaluation, another batch shape)
keeps every variable where it is, and places its ops around them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.fingerprint import fingerprint
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.place.asked import Effort, Placed
from smp_tf.partition.place.place import place
from smp_tf.partition.place.placement import Chain, Placement, check_units
from smp_tf.partition.place.solve_chain import follow_owners
from smp_tf.partition.place.solve_dag import MOST_CHOICES
from smp_tf.partition.plan.plan import Plan, Terms, as_seconds, make_plan
from smp_tf.partition.units.cost import Costs
from smp_tf.partition.units.recompute import needed_again
from smp_tf.partition.units.units import Unit, dependences, ordered_by_chunk
from smp_tf.pipeline.planner.by_hand import placed_by_script
from smp_tf.pipeline.planner.given import as_given, loaded
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.planner.times_by_size import other_sizes
from smp_tf.pipeline.planner.units import costs_in_order, pins, units_of

#: How many seconds a step searches for a placement beyond cuts of one order, or for a proof that there is none.
PROOF_SECONDS = 2.0
#: The largest product of units and stages that takes no longer than that.
_QUICK_CHOICES = 2_000
#: Gains in bytes, and in seconds of a step, that are not worth another second of waiting for the plan.
_WORTH = {"memory": 2.0**20, "speed": 1e-3}
#: Bytes sent per microbatch that are not worth it, either.
_WORTH_SENT = 2.0**20


@dataclass(frozen=True)
class _Solution:
    """A placement, with the units and costs that it is for.

    Args:
        units: units of the step, in the order of the chunks.
        costs: costs of the units.
        known: number of units whose times were measured.
        placed: the placement, and what is proved about it.
    """

    units: tuple[Unit, ...]
    costs: Costs
    known: int
    placed: Placed


def planned(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> Plan:
    """Places the units of a model, by what is known before the model is cut.

    Args:
        graph: the pruned op graph of a step.
        request: how many stages, and what to balance.
        owners: chunk of variables whose owner an earlier step decided, by index.

    Returns:
        The plan. What stages receive ahead and work with is not in its forecast.

    Raises:
        PlacementError: the model has too few units, it is not the model of the given plan, or data would have to flow
            backwards between the owners that an earlier step decided.
        MemoryLimitError: a rank would need more than it may.
    """
    units = _in_order(graph, request, owners)
    costs, known = costs_in_order(graph, units, request)
    if request.fixed.given is not None:
        placed = Placed(as_given(graph, units, costs, request.fixed.given, request, owners), None)
        owners = {**placed.placement.owners, **owners}
        found = _Solution(units, costs, known, placed)
    else:
        found = _solved(graph, _Solution(units, costs, known, _solve(graph, units, costs, request, owners)), request)
    found = _made_again_where_needed(graph, found, request)
    plan = make_plan(
        graph,
        found.units,
        found.costs,
        found.placed.placement,
        Terms(
            request.course.chunks,
            request.course.microbatches,
            request.course.schedule,
            request.aim.objective,
            speed=request.hardware.ranks.speed if request.hardware.ranks is not None else None,
            slot_shares=request.storage.slot_shares,
        ),
        fingerprint=fingerprint(graph),
        owners=owners,
        gap=found.placed.gap,
    )
    reasons = (*plan.reasons, *_reasons(graph, plan, found, request))
    earlier = request.held.get(plan.placement_key, ()) if request.held else ()
    return dataclasses.replace(plan, reasons=reasons, trade=found.placed.trade, earlier=earlier)


def _in_order(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> tuple[Unit, ...]:
    """Returns the units in the order of a file, or of the chunks that an earlier step decided."""
    units = units_of(graph)
    if request.fixed.given is not None:
        at = {name: position for position, name in enumerate(request.fixed.given.units)}
        return tuple(
            dataclasses.replace(unit, index=index)
            for index, unit in enumerate(sorted(units, key=lambda unit: at[unit.name]))
        )
    if owners:
        return ordered_by_chunk(graph, units, pins(units, owners))
    # This comes before schedules and costs for so many stages are made.
    check_units([unit.name for unit in units], request.course.stages)
    return units


def _solved(graph: OpGraph, found: _Solution, request: PlacementRequest) -> _Solution:
    """Returns a solution whose units are in the order of its chunks."""
    placement = found.placed.placement
    if all(later >= chunk for chunk, later in pairwise(placement.chunk_of)):
        return found
    units = ordered_by_chunk(graph, found.units, placement.chunk_of)
    costs, known = costs_in_order(graph, units, request)
    chain = Chain.of([unit.name for unit in units], costs, pinned=sorted(placement.chunk_of))
    placement = _by_owners(chain, request, placement.owners)
    return _Solution(units, costs, known, dataclasses.replace(found.placed, placement=placement))


def _made_again_where_needed(graph: OpGraph, found: _Solution, request: PlacementRequest) -> _Solution:
    """Returns the solution with costs in which backward makes again only what its stages do not keep anyway."""
    if not found.costs.groups:
        return found
    whole = [group for group in found.costs.groups if group is not None]
    groups = needed_again(whole, found.placed.placement.chunk_of, request.course.chunks.most_of_each)
    if groups == found.costs.groups:
        return found
    costs, known = costs_in_order(graph, found.units, request, groups)
    # The proof is about the costs that the solver has seen, and not about these.
    without = "some layers turned out not to be made again"
    trade = found.placed.trade and found.placed.trade.unproved()
    placed = dataclasses.replace(found.placed, gap=None, without=without, trade=trade)
    return _Solution(found.units, costs, known, placed)


def _reasons(graph: OpGraph, plan: Plan, found: _Solution, request: PlacementRequest) -> Iterator[str]:
    """Yields what decided a plan, besides the stage that has most, one sentence each."""
    units, costs, known = found.units, found.costs, found.known
    if found.placed.without is not None:
        yield f"no more is proved of this placement: {found.placed.without}"
    if request.fixed.given is not None:
        yield loaded(request.fixed.given, plan.fingerprint)
    if request.course.recompute and graph.gradients:
        yield _made_again(plan, costs)
    if known and request.times.sizes:
        which = other_sizes(request.times.sizes)
        yield f"the times of {known} of the {len(units)} units are by measured ones of {which}"
    elif known:
        yield f"the times are measured ones, of {known} of the {len(units)} units"
    message = costs.machine.message
    if message is not None and plan.stages > 1:
        yield (
            f"a message takes {as_seconds(message.seconds)} of the processors of both its ranks, and "
            f"{as_seconds(message.seconds_per_byte * 2**20)} for each MiB, as measured: that is part of a stage's time"
        )
    if costs.alone != (1.0, 1.0):
        forward, backward = (f"{share:.0%}" for share in costs.alone)
        yield (
            f"while other ranks of its host wait, layers take {forward} of their time forward, {backward} backward: "
            f"so the step is foreseen, while placements are compared by the times next to others"
        )


def _made_again(plan: Plan, costs: Costs) -> str:
    """Returns a sentence about what is made again in backward, and what it costs."""
    again = sum(cost.seconds.remade for cost in costs.units)
    rest = sum(cost.seconds.both for cost in costs.units) - again
    count = sum(cost.seconds.remade > 0 for cost in costs.units)
    if not count:
        return "recompute: nothing is made again, since no less would be kept"
    groups = len({(plan.units[name], group) for name, group in plan.recompute.items()})
    many = "1 group" if groups == 1 else f"{groups} groups"
    return (
        f"recompute: backward makes again what {count} of the {len(plan.units)} units keep otherwise, in {many}; that "
        f"is {again / (rest or 1.0):.0%} more to compute"
    )


def _solve(
    graph: OpGraph,
    units: Sequence[Unit],
    costs: Costs,
    request: PlacementRequest,
    owners: Mapping[int, int],
) -> Placed:
    fixed = pins(units, owners)
    placed = placed_by_script(units, request, bool(owners))
    # An earlier step's decision counts more than what the script now says about the layer.
    manual = [stage if pin is None else None for stage, pin in zip(placed, fixed, strict=True)]
    chain = Chain.of([unit.name for unit in units], costs, manual=manual, pinned=fixed)
    decided = any(pin is not None for pin in fixed)
    if not decided or any(pin is None and unit.variables for unit, pin in zip(units, fixed, strict=True)):
        try:
            return place(
                chain,
                dependences(graph, [unit.nodes for unit in units]).edges,
                request.course.stages,
                objective=request.aim.objective,
                microbatches=request.course.microbatches,
                ranks=request.hardware.ranks,
                chunks=request.course.chunks,
                effort=Effort(
                    0.0 if decided else request.aim.proof_seconds,
                    worth=0.0 if request.aim.thorough else _WORTH.get(request.aim.objective, 0.0),
                    most_choices=MOST_CHOICES if request.aim.thorough else _QUICK_CHOICES,
                    tolerance=request.aim.balance_tolerance,
                    worth_sent=0.0 if request.aim.thorough else _WORTH_SENT,
                ),
            )
        except PlacementError:
            if not decided:
                raise
    # An earlier step's decision leaves no choice. A step that uses a part of the models leaves chunks empty.
    return Placed(_by_owners(chain, request, owners), None)


def _by_owners(chain: Chain, request: PlacementRequest, owners: Mapping[int, int]) -> Placement:
    course = request.course
    return follow_owners(chain, course.stages, owners, course.microbatches, course.chunks, request.hardware.ranks)

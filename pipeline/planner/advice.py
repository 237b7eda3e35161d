"""Words for settings that would fit where a step does not, each of them alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.plan.memory_limit import enough
from smp_tf.partition.plan.plan import Plan
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.planner.limits import as_cut, fits, is_possible, smallest_of
from smp_tf.pipeline.planner.plan import planned
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.planner.units import costs_of, units_of
from smp_tf.pipeline.schedules.schedule import IN_ORDER, is_named

#: How many numbers of partitions are tried for one with which a model fits.
_MOST_PARTITIONS = 8
#: The number of units times stages above which only recompute is tried, since each try would take many seconds.
_MOST_TO_TRY = 50_000


def nearest(graph: OpGraph, request: PlacementRequest, plan: Plan) -> Iterator[str]:
    """Yields settings with which a step does fit, each of them alone.

    Args:
        graph: the pruned op graph of the step.
        request: the request for the plan.
        plan: the plan that comes nearest to fitting.
    """
    assert request.hardware.ranks is not None
    units = len(units_of(graph))
    is_quick = units * request.course.stages <= _MOST_TO_TRY
    if request.fixed.given is None and request.fixed.default is None and is_quick:
        more = _more(request.course.stages, units)
        found = request.aim.more_partitions
        yield from _more_partitions(graph, request, more) if found is None else found(more)
    # A training has its processes, and all of them take part.
    if request.storage.replicas > 1 and request.aim.more_partitions is not None:
        alone = request.changed(replicas=1, averaging_bytes=0, slot_shares=1, proof_seconds=0.0)
        if fits(graph, alone):
            yield "1 replica"
    asked = request.course.schedule
    kinds = [kind for kind in IN_ORDER if kind != asked and graph.gradients and request.fixed.given is None]
    for kind in kinds if request.course.stages > 1 and is_named(asked) and is_quick else ():
        other = request.changed(schedule=kind, proof_seconds=0.0)
        if is_possible(kind, request, units) and fits(graph, other):
            yield f'pipeline "{kind}"'
            break
    if graph.gradients and not request.course.recompute:
        again = request.changed(recompute=True, proof_seconds=0.0)
        if fits(graph, again):
            yield f"recompute true{_slower(graph, again)}"
    if is_quick:
        yield from _smaller_microbatches(graph, request) if request.aim.others is None else request.aim.others()
    yield enough(plan, request.hardware.ranks)


def _more_partitions(graph: OpGraph, request: PlacementRequest, numbers: Iterable[int]) -> Iterator[str]:
    """Yields the first of some larger numbers of stages with which the step fits, on ranks that do not differ."""
    if len(set(request.limits)) > 1:
        return
    for stages in numbers:
        ranks = Ranks.alike(stages, request.limits[0])
        if fits(graph, request.changed(stages=stages, ranks=ranks, proof_seconds=0.0)):
            yield f"{stages} partitions"
            return


def _smaller_microbatches(graph: OpGraph, request: PlacementRequest) -> Iterator[str]:
    """Yields the first of some larger numbers of microbatches with which the step would about fit.

    The graph is for one size of microbatches. What is kept, sent and worked with is assumed to shrink as the microbatch
    does.
    """
    if request.fixed.given is not None or not is_named(request.course.schedule) or not graph.gradients:
        return
    limits, asked = request.limits, request.course.microbatches
    many, batch = asked, asked * request.course.samples
    request = smallest_of(request).changed(proof_seconds=0.0)
    while (many := 2 * many) <= batch:
        smaller = 1.0 - asked / many
        cut_into = request.changed(microbatches=many)
        try:
            rows = as_cut(graph, cut_into, planned(graph, cut_into, {})).forecast
        except (PlacementError, ScheduleError):
            return
        needs = [
            row.device_bytes - smaller * (row.stash_bytes + row.transport_bytes + row.working_bytes) for row in rows
        ]
        if all(limit is None or need <= limit for need, limit in zip(needs, limits, strict=True)):
            yield f"about {many} microbatches"
            return


def _more(stages: int, units: int) -> Sequence[int]:
    """Returns some larger numbers of stages: the next ones, then ever larger steps, up to a stage for every unit."""
    found: list[int] = []
    while stages < units and len(found) < _MOST_PARTITIONS:
        stages = min(stages + max(1, stages // 4), units)
        found.append(stages)
    return found


def _slower(graph: OpGraph, request: PlacementRequest) -> str:
    """Returns words for how much longer a step takes when backward makes things again."""
    _, costs = costs_of(graph, request)
    again = sum(cost.seconds.remade for cost in costs.units)
    rest = sum(cost.seconds.both for cost in costs.units) - again
    return f", with {again / rest:.0%} more to compute" if rest else ""

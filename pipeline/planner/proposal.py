"""The plan that a rank proposes: the best one that keeps within what ranks may need once the model is cut.

planned ──▶ cut ──▶ does each stage need what its rank may? ──▶ the plan
   ▲                   │ no: plan again, with as much less
   └───────────────────┘                      never: which stage needs too much, and what is nearest that fits
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.plan.memory_limit import enough, excess, too_large
from smp_tf.partition.plan.plan import Plan, as_bytes
from smp_tf.partition.plan.report import proved
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.planner.memory_forecast import with_exact_transfers
from smp_tf.pipeline.planner.plan import PlacementRequest, costs_of, cut, placement_by_hand, planned, units_of
from smp_tf.pipeline.planner.timeline import timeline_of
from smp_tf.pipeline.schedules.schedule import IN_ORDER, LEAN, is_named, placement_of, runs_on

#: Stands for the schedule that ends its step first.
AUTO = "auto"
#: A schedule that is this much slower is as fast; the first of them is taken.
_AS_FAST = 0.01

#: Cuts to try, each with less memory than the one before, until one keeps within the limit with all that it needs.
_MOST_CUTS = 8
#: Between a cut that needs too much and a limit within which there is none, so many limits are tried.
_MOST_HALVINGS = 3
#: Numbers of partitions to try for one with which a model fits.
_MOST_PARTITIONS = 8
#: Units times stages beyond which no other settings but recompute are tried: each would take many seconds.
_MOST_TO_TRY = 50_000


def propose(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> Plan:
    """Places the units of a model over the stages.

    Args:
        graph: the pruned op graph of a step.
        request: how many stages, and what to balance.
        owners: stage of variables whose owner an earlier step decided, by index.

    Returns:
        The plan.

    Raises:
        PlacementError: the model has too few units, it is not the one of the plan that is given, or data would have to
            flow backwards between the owners that an earlier step decided.
        MemoryLimitError: no plan was found with which every rank needs what it may; the message says what would fit.
    """
    if not request.contiguous:
        return _visited_again(graph, dataclasses.replace(request, contiguous=True), owners)
    if request.schedule == AUTO:
        return _fastest(graph, request, owners)
    if all(limit is None for limit in request.limits):
        return planned(graph, request, owners)
    plan, fits = _within(graph, request, owners)
    if not fits:
        assert request.ranks is not None
        raise too_large(
            plan,
            request.ranks,
            _nearest(graph, request, plan) if request.advise and not owners else (),
            averaging=request.averaging_bytes if graph.gradients else 0,
            is_given=request.given is not None,
        )
    return plan


def _fastest(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> Plan:
    """Returns the plan whose schedule ends its step first, of those that keep within the limits."""
    passes = request.stages > 1 and request.microbatches > 1 and graph.gradients
    seconds: dict[str, float] = {}
    plans: dict[str, Plan] = {}
    refused: list[MemoryLimitError] = []
    units = len(units_of(graph))
    kinds = [kind for kind in IN_ORDER if _is_possible(kind, request, units)]
    # Where there are too few layers for any, the error is that of one of them.
    kinds = kinds or ["interleaved_1f1b" if request.chunks_per_rank else "interleaved"]
    for kind in kinds if passes else kinds[:1]:
        one = dataclasses.replace(request, schedule=kind, proof_seconds=0.0, advise=request.advise and not refused)
        try:
            plans[kind] = propose(graph, one, owners)
        except MemoryLimitError as error:
            refused.append(error)
            continue
        except PlacementError:
            # Chunks that agree with what is placed by hand are not to be had.
            if kind == kinds[0]:
                raise
            continue
        seconds[kind] = _step_time(graph, one, plans[kind])
    if not seconds:
        raise refused[0]
    taken = next(kind for kind in seconds if seconds[kind] <= min(seconds.values()) * (1 + _AS_FAST))
    plan = plans[taken]
    if request.proof_seconds > 0:
        # Only of the one that is taken a better placement is looked for.
        plan = propose(graph, dataclasses.replace(request, schedule=taken), owners)
    if not passes:
        return plan
    others = [f"{kind} {_beside(seconds[kind], seconds[taken])}" for kind in seconds if kind != taken]
    others += [f"{kind} does not fit" for kind in kinds if kind not in seconds]
    return dataclasses.replace(plan, reasons=(*plan.reasons, f"schedule {taken}: {', '.join(others)}"))


def _is_possible(kind: str, request: PlacementRequest, units: int) -> bool:
    """Returns whether a schedule can be had with the chunks that are asked for, of so many units."""
    if kind in LEAN and all(limit is None for limit in request.limits):
        return False
    if request.placement is not None:
        return runs_on(kind, request.placement)
    try:
        return len(placement_of(kind, request.stages, request.chunks_per_rank)) <= max(units, request.stages)
    except ScheduleError:
        return False


def _step_time(graph: OpGraph, request: PlacementRequest, plan: Plan) -> float:
    """Returns the seconds of a step by a plan, simulated."""
    done = cut(graph, plan, request.local_outputs, request.composites)
    return timeline_of(plan, *costs_of(graph, request, plan), done, request.samples, request.ranks).step_time


def _visited_again(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> Plan:
    """Returns the best of plans of different shapes: stages of one run of the layers each, and with two runs.

    one run each   0 1 2
    both ends      0 1 2 0      what they share comes together, such as an embedding that is the last kernel, too
    folded         0 1 2 1 0    the same, of smaller runs, which may even out better
    """
    if request.stages == 1 or request.placement is not None or owners:
        return propose(graph, request, owners)
    by_hand = placement_by_hand(graph, request)
    if by_hand is not None and (request.schedule == AUTO or runs_on(request.schedule, by_hand)):
        return propose(graph, dataclasses.replace(request, placement=by_hand), owners)
    there = tuple(range(request.stages))
    shapes = {(*there, 0): "stage 0 has two runs of the layers, both ends of the model"}
    # Of two stages the one shape is the other.
    shapes.setdefault((*there, *there[-2::-1]), "all stages but the last have two runs of the layers, there and back")
    possible = [shape for shape in shapes if request.schedule == AUTO or runs_on(request.schedule, shape)]
    if not possible:
        return propose(graph, request, owners)
    plans: list[Plan] = []
    refused: list[PlacementError] = []
    for placement in (None, *possible):
        try:
            plans.append(propose(graph, dataclasses.replace(request, placement=placement), owners))
        except PlacementError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    scores = [_score(graph, request, plan) for plan in plans]
    best = next(at for at, score in enumerate(scores) if score <= min(scores) * (1 + _AS_FAST))
    if plans[best].placement in shapes:
        reason = f"{shapes[plans[best].placement]}: no cut into one run each is as good"
    else:
        why = str(refused[0]).splitlines()[0] if refused else "that would gain nothing"
        reason = f"no stage is visited more often than the schedule asks for: {why}"
    return dataclasses.replace(plans[best], reasons=(*plans[best].reasons, reason))


def _score(graph: OpGraph, request: PlacementRequest, plan: Plan) -> float:
    """Returns what is balanced, of a plan that is cut: seconds of a step, or bytes of the fullest stage."""
    if request.objective == "speed":
        return _step_time(graph, dataclasses.replace(request, schedule=plan.schedule), plan)
    return max(row.device_bytes for row in _as_cut(graph, request, plan).forecast)


def _beside(seconds: float, taken: float) -> str:
    """Returns how long another schedule takes, in words."""
    longer = round(100 * (seconds / taken - 1)) if taken else 0
    return f"takes {longer}% longer" if longer > 0 else "takes as long"


def _within(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> tuple[Plan, bool]:
    """Returns a plan that keeps within the limits once it is cut; or the nearest to one, and False.

    What the solver goes by is known before the cut: weights, gradients, slots and stash. What a stage receives ahead
    and works with is known after it; where that is too much, the solver is given as much less.
    """
    tried: list[Plan] = []
    less = lenient = [0.0] * request.stages
    thorough, halvings = request.proof_seconds, _MOST_HALVINGS
    for _ in range(_MOST_CUTS + _MOST_HALVINGS):
        try:
            plan = planned(graph, _with_limits(request, less), owners)
        except MemoryLimitError:
            if halvings and less != lenient:
                # By as much the last cut needed more than the solver counts of it; another one may not.
                halvings -= 1
                less = [(few + many) / 2 for few, many in zip(lenient, less, strict=True)]
                continue
            if request.proof_seconds == thorough:
                break
            # No cut of one order fits any more; layers next to each other may.
            request = dataclasses.replace(request, proof_seconds=thorough)
            continue
        again = next((other for other in tried if other.units == plan.units), None)
        done = again or _as_cut(graph, request, plan)
        if excess(done, request.limits) <= 0:
            return _with_price(graph, request, owners, plan, is_proved=not any(less)), True
        if again is None:
            tried.append(done)
        lenient, less = less, list(less)
        for stage, (row, limit) in enumerate(zip(done.forecast, request.limits, strict=True)):
            if limit is None or row.device_bytes <= limit:
                continue
            less[stage] += row.device_bytes - limit
            if again is not None:
                # What the solver counts of it is so little that it has to be ruled out itself.
                less[stage] = max(less[stage], limit - plan.forecast[stage].device_bytes + 1)
        # One search beyond the cuts of one order is enough.
        request = dataclasses.replace(request, proof_seconds=0.0)
    smallest = planned(graph, dataclasses.replace(_without_limits(request), objective="memory"), owners)
    tried.append(_as_cut(graph, request, smallest))
    if excess(tried[-1], request.limits) <= 0:
        plan = dataclasses.replace(smallest, objective=request.objective)
        return _with_price(graph, request, owners, plan, is_proved=False), True
    return min(tried, key=lambda plan: excess(plan, request.limits)), False


def _with_limits(request: PlacementRequest, less: Sequence[float]) -> PlacementRequest:
    assert request.ranks is not None
    memory = tuple(
        None if limit is None else limit - part for limit, part in zip(request.ranks.memory, less, strict=True)
    )
    return dataclasses.replace(request, ranks=dataclasses.replace(request.ranks, memory=memory))


def _without_limits(request: PlacementRequest) -> PlacementRequest:
    assert request.ranks is not None
    ranks = dataclasses.replace(request.ranks, memory=(None,) * request.stages)
    return dataclasses.replace(request, ranks=ranks)


def _as_cut(graph: OpGraph, request: PlacementRequest, plan: Plan) -> Plan:
    done = cut(graph, plan, request.local_outputs, request.composites)
    return with_exact_transfers(plan, done, request)


def _with_price(
    graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int], plan: Plan, *, is_proved: bool
) -> Plan:
    """Returns the plan, with a word about the limits where it would be another one without.

    Args:
        graph: the pruned op graph of a step.
        request: how many stages, and what to balance.
        owners: chunk of variables whose owner an earlier step decided, by index.
        plan: keeps within the limits.
        is_proved: whether its gap is to all placements that do, and not to those within limits that a solver was given.
    """
    without = dataclasses.replace(_without_limits(request), proof_seconds=0.0)
    if planned(graph, without, owners).units == plan.units:
        return plan
    assert request.ranks is not None
    limits = sorted({limit for limit in request.limits if limit is not None})
    size = as_bytes(limits[0]) if len(limits) == 1 else f"{as_bytes(limits[0])} to {as_bytes(limits[-1])}"
    what = dict.fromkeys(
        request.ranks.limit_in_words(stage) for stage, limit in enumerate(request.limits) if limit is not None
    )
    name = next(iter(what)) if len(what) == 1 else "the memory of ranks"
    said = [f"{name}, {size} a rank, rules out the cut that would be best otherwise"]
    if is_proved and plan.gap is not None:
        said += [f"within {name} {line}" for line in proved(plan)]
    else:
        said.append("nothing is proved of it: what stages receive and work with is known only when a model is cut")
    return dataclasses.replace(plan, gap=None, reasons=(*plan.reasons, *said))


def _nearest(graph: OpGraph, request: PlacementRequest, plan: Plan) -> Iterator[str]:
    """Yields the settings with which the step does fit, each of them alone."""
    assert request.ranks is not None
    units = len(units_of(graph))
    is_quick = units * request.stages <= _MOST_TO_TRY
    if request.given is None and request.default is None and is_quick:
        more = _more(request.stages, units)
        found = request.more_partitions
        yield from _more_partitions(graph, request, more) if found is None else found(more)
    # A training has its processes, and all of them take part.
    if request.replicas > 1 and request.more_partitions is not None:
        alone = dataclasses.replace(request, replicas=1, averaging_bytes=0, slot_shares=1, proof_seconds=0.0)
        if _fits(graph, alone):
            yield "1 replica"
    kinds = [kind for kind in IN_ORDER if kind != request.schedule and graph.gradients and request.given is None]
    for kind in kinds if request.stages > 1 and is_named(request.schedule) and is_quick else ():
        other = dataclasses.replace(request, schedule=kind, proof_seconds=0.0)
        if _is_possible(kind, request, units) and _fits(graph, other):
            yield f'pipeline "{kind}"'
            break
    if graph.gradients and not request.recompute:
        again = dataclasses.replace(request, recompute=True, proof_seconds=0.0)
        if _fits(graph, again):
            yield f"recompute true{_slower(graph, again)}"
    if is_quick:
        yield from _smaller_microbatches(graph, request) if request.others is None else request.others()
    yield enough(plan, request.ranks)


def _more_partitions(graph: OpGraph, request: PlacementRequest, numbers: Iterable[int]) -> Iterator[str]:
    """Yields the first of some larger numbers of stages with which the step fits, on ranks that do not differ."""
    if len(set(request.limits)) > 1:
        return
    for stages in numbers:
        ranks = Ranks.alike(stages, request.limits[0])
        if _fits(graph, dataclasses.replace(request, stages=stages, ranks=ranks, proof_seconds=0.0)):
            yield f"{stages} partitions"
            return


def _smaller_microbatches(graph: OpGraph, request: PlacementRequest) -> Iterator[str]:
    """Yields the first of some larger numbers of microbatches with which the step would fit, about.

    The graph is that of one size of microbatches: what is kept, sent and worked with for one is taken to be as much
    smaller as it is.
    """
    if request.given is not None or not is_named(request.schedule) or not graph.gradients:
        return
    limits, many, batch = request.limits, request.microbatches, request.microbatches * request.samples
    request = dataclasses.replace(_without_limits(request), objective="memory", proof_seconds=0.0)
    while (many := 2 * many) <= batch:
        smaller = 1.0 - request.microbatches / many
        cut_into = dataclasses.replace(request, microbatches=many)
        try:
            rows = _as_cut(graph, cut_into, planned(graph, cut_into, {})).forecast
        except (PlacementError, ScheduleError):
            return
        needs = [
            row.device_bytes - smaller * (row.stash_bytes + row.transport_bytes + row.working_bytes) for row in rows
        ]
        if all(limit is None or need <= limit for need, limit in zip(needs, limits, strict=True)):
            yield f"about {many} microbatches"
            return


def _more(stages: int, units: int) -> Sequence[int]:
    """Returns some larger numbers of stages: the next ones, then ever farther ones, at most a stage for every unit."""
    found: list[int] = []
    while stages < units and len(found) < _MOST_PARTITIONS:
        stages = min(stages + max(1, stages // 4), units)
        found.append(stages)
    return found


def _slower(graph: OpGraph, request: PlacementRequest) -> str:
    """Returns by how much making things again in backward makes a step longer, in words."""
    _, costs = costs_of(graph, request)
    again = sum(cost.time_remade for cost in costs.units)
    rest = sum(cost.time_forward + cost.time_backward for cost in costs.units) - again
    return f", with {again / rest:.0%} more to compute" if rest else ""


def _fits(graph: OpGraph, request: PlacementRequest) -> bool:
    """Returns whether the placement with the least memory does."""
    try:
        smallest = planned(graph, dataclasses.replace(_without_limits(request), objective="memory"), {})
    except PlacementError:
        return False
    return excess(_as_cut(graph, request, smallest), request.limits) <= 0

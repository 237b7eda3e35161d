"""Proposes a plan: the best one that keeps within the limits of ranks once the model is cut.

planned ──▶ cut ──▶ does each stage need what its rank may? ──▶ the plan
   ▲                   │ no: plan again, with as much less
   └───────────────────┘                      never: which stage needs too much, and what is nearest that fits
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.memory_limit import excess, too_large
from smp_tf.partition.plan.plan import Plan, as_bytes
from smp_tf.partition.plan.report import proved
from smp_tf.pipeline.planner.advice import nearest
from smp_tf.pipeline.planner.by_hand import placement_by_hand
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.limits import as_cut, is_possible, smallest_of, with_less, without_limits
from smp_tf.pipeline.planner.plan import planned
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.planner.timeline import timeline_of
from smp_tf.pipeline.planner.units import costs_of, units_of
from smp_tf.pipeline.schedules.schedule import IN_ORDER, runs_on

#: The name that stands for the schedule that ends its step first.
AUTO = "auto"
#: The share by which a schedule may be slower and count as equally fast. The first of these is taken.
_AS_FAST = 0.01

#: How many cuts are tried, each with less memory than the one before, until all that one needs is within the limit.
_MOST_CUTS = 8
#: How many limits are tried between a cut that needs too much and a limit within which there is no cut.
_MOST_HALVINGS = 3


def propose(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> Plan:
    """Places the units of a model over the stages.

    Args:
        graph: the pruned op graph of a step.
        request: how many stages, and what to balance.
        owners: stage of variables whose owner an earlier step decided, by index.

    Returns:
        The plan.

    Raises:
        PlacementError: the model has too few units, it is not the model of the given plan, or data would have to flow
            backwards between the owners that an earlier step decided.
        MemoryLimitError: no plan was found that keeps every rank within its limit. The message says what would fit.
    """
    if not request.course.contiguous:
        return _visited_again(graph, request.changed(contiguous=True), owners)
    if request.course.schedule == AUTO:
        return _fastest(graph, request, owners)
    if all(limit is None for limit in request.limits):
        return planned(graph, request, owners)
    plan, fits = _within(graph, request, owners)
    if not fits:
        assert request.hardware.ranks is not None
        raise too_large(
            plan,
            request.hardware.ranks,
            nearest(graph, request, plan) if request.aim.advise and not owners else (),
            averaging=request.storage.averaging_bytes if graph.gradients else 0,
            is_given=request.fixed.given is not None,
        )
    return plan


def _fastest(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> Plan:
    """Returns the plan whose schedule ends its step first, among those that keep within the limits."""
    passes = request.course.stages > 1 and request.course.microbatches > 1 and graph.gradients
    seconds: dict[str, float] = {}
    plans: dict[str, Plan] = {}
    refused: list[MemoryLimitError] = []
    units = len(units_of(graph))
    kinds = [kind for kind in IN_ORDER if is_possible(kind, request, units)]
    # Where there are too few layers for all schedules, the error is that of one of them.
    kinds = kinds or ["interleaved_1f1b" if request.course.chunks_per_rank else "interleaved"]
    for kind in kinds if passes else kinds[:1]:
        one = request.changed(schedule=kind, proof_seconds=0.0, advise=request.aim.advise and not refused)
        try:
            plans[kind] = propose(graph, one, owners)
        except MemoryLimitError as error:
            refused.append(error)
            continue
        except PlacementError:
            # No chunks agree with what is placed by hand.
            if kind == kinds[0]:
                raise
            continue
        seconds[kind] = _step_time(graph, one, plans[kind])
    if not seconds:
        raise refused[0]
    taken = next(kind for kind in seconds if seconds[kind] <= min(seconds.values()) * (1 + _AS_FAST))
    plan = plans[taken]
    if request.aim.proof_seconds > 0:
        # A better placement is searched only for the schedule that is taken.
        plan = propose(graph, request.changed(schedule=taken), owners)
    if not passes:
        return plan
    others = [f"{kind} {_beside(seconds[kind], seconds[taken])}" for kind in seconds if kind != taken]
    others += [f"{kind} does not fit" for kind in kinds if kind not in seconds]
    return dataclasses.replace(plan, reasons=(*plan.reasons, f"schedule {taken}: {', '.join(others)}"))


def _step_time(graph: OpGraph, request: PlacementRequest, plan: Plan) -> float:
    """Returns the seconds of a step by a plan, simulated."""
    done = cut(graph, plan, request.outputs.local, request.outputs.composites)
    units, costs = costs_of(graph, request, plan)
    return timeline_of(plan, units, costs, done, request).step_time


def _visited_again(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> Plan:
    """Returns the best of plans of different shapes: with one run of layers on each stage, and with two.

    one run each   0 1 2
    both ends      0 1 2 0      what they share comes together, such as an embedding that is the last kernel, too
    folded         0 1 2 1 0    the same, of smaller runs, which may even out better
    """
    schedule = request.course.schedule
    if request.course.stages == 1 or request.course.placement is not None or owners:
        return propose(graph, request, owners)
    by_hand = placement_by_hand(graph, request)
    if by_hand is not None and (schedule == AUTO or runs_on(schedule, by_hand)):
        return propose(graph, request.changed(placement=by_hand), owners)
    there = tuple(range(request.course.stages))
    shapes = {(*there, 0): "stage 0 has two runs of the layers, both ends of the model"}
    # With two stages, both shapes are the same.
    shapes.setdefault((*there, *there[-2::-1]), "all stages but the last have two runs of the layers, there and back")
    possible = [shape for shape in shapes if schedule == AUTO or runs_on(schedule, shape)]
    if not possible:
        return propose(graph, request, owners)
    plans: list[Plan] = []
    refused: list[PlacementError] = []
    for placement in (None, *possible):
        try:
            plans.append(propose(graph, request.changed(placement=placement), owners))
        except PlacementError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    best = _best_of(plans, [_score(graph, request, plan) for plan in plans], request.aim.balance_tolerance)
    if plans[best].placement in shapes:
        reason = f"{shapes[plans[best].placement]}: no cut into one run each is as good"
    else:
        why = str(refused[0]).splitlines()[0] if refused else "that would gain nothing"
        reason = f"no stage is visited more often than the schedule asks for: {why}"
    return dataclasses.replace(plans[best], reasons=(*plans[best].reasons, reason))


def _best_of(plans: Sequence[Plan], scores: Sequence[float], tolerance: float) -> int:
    """Returns the number of the plan that is taken.

    Args:
        plans: plans of different shapes, the simplest first.
        scores: their scores. The best is the least.
        tolerance: the share by which the score may be above the best, so that fewer bytes are sent; 0 for the best.
    """
    trades = [plan.trade for plan in plans]
    if not tolerance or any(trade is None for trade in trades):
        return next(at for at, score in enumerate(scores) if score <= min(scores) * (1 + _AS_FAST))
    # A plan that has given up balance for fewer bytes may not be near the best of another shape.
    given_up = [trade.balanced.balance / (trade.taken.balance or 1.0) for trade in trades if trade is not None]
    best = min(score * share for score, share in zip(scores, given_up, strict=True))
    most = max(best * (1 + tolerance), min(scores))
    near = [at for at, score in enumerate(scores) if score <= most]
    return min(near, key=lambda at: (trade.taken.sent, scores[at]) if (trade := trades[at]) is not None else (0.0, 0.0))


def _score(graph: OpGraph, request: PlacementRequest, plan: Plan) -> float:
    """Returns the score of a plan that is cut: seconds of a step, or bytes of the fullest stage."""
    if request.aim.objective == "speed":
        return _step_time(graph, request.changed(schedule=plan.schedule), plan)
    return max(row.device_bytes for row in as_cut(graph, request, plan).forecast)


def _beside(seconds: float, taken: float) -> str:
    """Returns words for how long another schedule takes."""
    longer = round(100 * (seconds / taken - 1)) if taken else 0
    return f"takes {longer}% longer" if longer > 0 else "takes as long"


def _within(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> tuple[Plan, bool]:
    """Returns a plan that keeps within the limits once it is cut, and True; or the nearest plan, and False.

    The solver uses what is known before the cut: weights, gradients, slots and stash. What a stage receives ahead and
    works with is known only after it. Where this is too much, the solver's limit is lowered by as much.
    """
    tried: list[Plan] = []
    less = lenient = [0.0] * request.course.stages
    thorough, halvings = request.aim.proof_seconds, _MOST_HALVINGS
    for _ in range(_MOST_CUTS + _MOST_HALVINGS):
        try:
            plan = planned(graph, with_less(request, less), owners)
        except MemoryLimitError:
            if halvings and less != lenient:
                # The last cut needed this much more than the solver counts. Another cut may not.
                halvings -= 1
                less = [(few + many) / 2 for few, many in zip(lenient, less, strict=True)]
                continue
            if request.aim.proof_seconds == thorough:
                break
            # No cut of one order fits any more. Branches next to each other may.
            request = request.changed(proof_seconds=thorough)
            continue
        again = next((other for other in tried if other.units == plan.units), None)
        done = again or as_cut(graph, request, plan)
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
                # The solver counts so little of it that the cut itself must be ruled out.
                less[stage] = max(less[stage], limit - plan.forecast[stage].device_bytes + 1)
        # One search beyond the cuts of one order is enough.
        request = request.changed(proof_seconds=0.0)
    smallest = planned(graph, smallest_of(request), owners)
    tried.append(as_cut(graph, request, smallest))
    if excess(tried[-1], request.limits) <= 0:
        plan = dataclasses.replace(smallest, objective=request.aim.objective)
        return _with_price(graph, request, owners, plan, is_proved=False), True
    return min(tried, key=lambda plan: excess(plan, request.limits)), False


def _with_price(
    graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int], plan: Plan, *, is_proved: bool
) -> Plan:
    """Returns the plan, with a remark about the limits where the plan would be another one without them.

    Args:
        graph: the pruned op graph of a step.
        request: how many stages, and what to balance.
        owners: chunk of variables whose owner an earlier step decided, by index.
        plan: a plan that keeps within the limits.
        is_proved: whether its gap is to all placements within the limits, and not only to those within a solver's
            limits.
    """
    without = without_limits(request).changed(proof_seconds=0.0)
    if planned(graph, without, owners).units == plan.units:
        return plan
    assert request.hardware.ranks is not None
    limits = sorted({limit for limit in request.limits if limit is not None})
    size = as_bytes(limits[0]) if len(limits) == 1 else f"{as_bytes(limits[0])} to {as_bytes(limits[-1])}"
    what = dict.fromkeys(
        request.hardware.ranks.limit_in_words(stage) for stage, limit in enumerate(request.limits) if limit is not None
    )
    name = next(iter(what)) if len(what) == 1 else "the memory of ranks"
    said = [f"{name}, {size} a rank, rules out the cut that would be best otherwise"]
    if is_proved and plan.gap is not None:
        said += [f"within {name} {line}" for line in proved(plan)]
    else:
        said.append("nothing is proved of it: what stages receive and work with is known only when a model is cut")
    return dataclasses.replace(plan, gap=None, reasons=(*plan.reasons, *said))

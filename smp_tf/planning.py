"""From a pruned step to a cut one: place the units, agree on the plan with all ranks, cut.

Ownership is decided once per model, by the first step that uses it. A later step (evaluation, another batch shape)
keeps every variable where it is, and places its ops around them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from smp_tf.partition.assign import Assignment, Role, assign
from smp_tf.partition.cost import Costs, estimate, with_measured
from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.fingerprint import fingerprint
from smp_tf.partition.memory_limit import excess, too_large
from smp_tf.partition.op_graph import OpGraph, Tensor
from smp_tf.partition.plan import Plan, StageForecast, as_bytes, make_plan
from smp_tf.partition.plan_file import StoredPlan
from smp_tf.partition.solve_chain import Chain, ChainSolution, follow_owners, solve_chain
from smp_tf.partition.split import Split, split
from smp_tf.partition.sums import sum_before_sending
from smp_tf.partition.units import AFTER_MODEL, Unit, build_units, ordered_by_stage, weight_derived
from smp_tf.partition.working_set import working_set
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
        samples: samples of a microbatch, where the graph leaves that length open.
        measured: seconds forward and backward of units that were measured, by name.
        default: where the script places all layers, the stage of those it has not placed; else None.
        given: the plan of a file, which leaves no choice; else None.
        memory_limit: bytes that no stage may need; None for no limit.
        local_outputs: positions of outputs that stay with the stage that makes them.
        composites: positions of outputs that are parts of one composite tensor.
    """

    stages: int
    microbatches: int
    schedule: str
    objective: str
    slots: float
    samples: int = 1
    measured: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    default: int | None = None
    given: StoredPlan | None = None
    memory_limit: int | None = None
    local_outputs: frozenset[int] = frozenset()
    composites: Sequence[tuple[int, ...]] = ()


#: Cuts to try, each with less memory than the one before, until one keeps within the limit with all that it needs.
_MOST_CUTS = 8


def prune(graph: OpGraph) -> OpGraph:
    """The graph without the ops that neither an output nor an effect needs, nor the placement of a trained weight."""
    wanted = [t.node for t in graph.outputs] + [n for n, node in enumerate(graph.nodes) if node.stateful]
    wanted += _only_uses_of_trained(graph, graph.ancestors(wanted))
    return graph.subgraph(graph.ancestors(wanted))


def _only_uses_of_trained(graph: OpGraph, needed: Collection[int]) -> list[int]:
    """Forward ops that use a weight whose gradient is needed, where none of them is needed itself.

    The gradient of a linear layer needs nothing of the layer's forward pass, but who stores the weight is decided by
    what uses it. TensorFlow leaves such ops out of the segments, in which nothing reads them.
    """
    trained = {g.variable for g in graph.gradients if all(t.node in needed for t in g.tensors)}
    trained &= {v.index for v in graph.variables if v.in_model}
    if not trained:
        return []
    derived = weight_derived(graph)
    uses: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        if node.call == 0 or node.backward or number in derived:
            continue
        of_inputs = (derived.get(t.node, frozenset()) for t in node.inputs)
        for variable in trained.intersection({*node.reads}.union(*of_inputs)):
            uses.setdefault(variable, []).append(number)
    return [number for users in uses.values() if not any(n in needed for n in users) for number in users]


def units_of(graph: OpGraph) -> tuple[Unit, ...]:
    """The units to place: those of the model, and with the last of them the loss, which is no stage of its own."""
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


def propose(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> Plan:
    """Place the units of a model over the stages.

    Args:
        graph: the pruned op graph of a step.
        request: how many stages, and what to balance.
        owners: stage of variables whose owner an earlier step decided, by index.

    Returns:
        The plan.

    Raises:
        PlacementError: the model has too few units, it is not the one of the plan that is given, or data would have to
            flow backwards between the owners that an earlier step decided.
        MemoryLimitError: no plan was found that keeps within the memory limit.
    """
    if request.memory_limit is None:
        return _proposed(graph, request, owners)
    return _within(graph, request, owners, request.memory_limit)


def _within(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int], limit: int) -> Plan:
    """A plan that keeps within the memory limit once it is cut.

    What the solver goes by is known before the cut: weights, gradients, slots and stash. What a stage receives ahead
    and works with is known after it; where that is too much, the solver is given as much less.
    """
    tried: list[Plan] = []
    allowed = limit
    while allowed > 0 and len(tried) < _MOST_CUTS:
        try:
            plan = _proposed(graph, request, owners, allowed)
        except MemoryLimitError:
            break
        if any(plan.units == other.units for other in tried):
            break
        tried.append(_as_cut(graph, request, plan))
        over = excess(tried[-1], limit)
        if over <= 0:
            return _with_price(graph, request, owners, plan, limit)
        allowed -= over
    smallest = _proposed(graph, dataclasses.replace(request, objective="memory"), owners)
    tried.append(_as_cut(graph, request, smallest))
    if excess(tried[-1], limit) <= 0:
        plan = dataclasses.replace(smallest, objective=request.objective)
        return _with_price(graph, request, owners, plan, limit)
    raise too_large(min(tried, key=lambda plan: excess(plan, limit)), limit)


def _as_cut(graph: OpGraph, request: PlacementRequest, plan: Plan) -> Plan:
    done = cut(graph, plan, request.local_outputs, request.composites)
    return with_exact_transfers(plan, done, request.samples)


def _with_price(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int], plan: Plan, limit: int) -> Plan:
    """The plan, with a word about the memory limit where it would be another one without."""
    if _proposed(graph, request, owners).units == plan.units:
        return plan
    said = f"memory_limit, {as_bytes(limit)} a rank, rules out the cut that would be best otherwise"
    return dataclasses.replace(plan, reasons=(*plan.reasons, said))


def _proposed(
    graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int], memory_limit: int | None = None
) -> Plan:
    units = units_of(graph)
    if owners and request.given is None:
        units = ordered_by_stage(graph, units, _pins(units, owners))
    costs, known = _costs_of(graph, units, request)
    held = in_flight(request.schedule, request.stages, request.microbatches)
    pins = _pins(units, owners)
    if request.given is not None:
        solution = _as_given(graph, units, costs, request.given, request, owners, held)
        owners = {**solution.owners, **owners}
    else:
        solution = _solve(units, costs, request, owners, pins, held, memory_limit)
    plan = make_plan(
        graph,
        units,
        costs,
        solution,
        in_flight=held,
        microbatches=request.microbatches,
        schedule=request.schedule,
        objective=request.objective,
        fingerprint=fingerprint(graph),
        owners=owners,
    )
    if request.given is not None:
        plan = dataclasses.replace(plan, reasons=(*plan.reasons, "the placement is that of the plan that was loaded"))
    if known:
        said = f"the times are measured ones, of {known} of the {len(units)} units"
        plan = dataclasses.replace(plan, reasons=(*plan.reasons, said))
    return plan


def costs_of(graph: OpGraph, request: PlacementRequest) -> tuple[tuple[Unit, ...], Costs]:
    """The units of a step, and what each costs for one microbatch.

    Args:
        graph: the pruned op graph.
        request: what the costs depend on besides.
    """
    units = units_of(graph)
    return units, _costs_of(graph, units, request)[0]


def _costs_of(graph: OpGraph, units: Sequence[Unit], request: PlacementRequest) -> tuple[Costs, int]:
    """The costs, and how many of the units were measured."""
    costs = estimate(graph, units, slots=request.slots, microbatches=request.microbatches, unknown=request.samples)
    return with_measured(costs, units, request.measured)


def _solve(
    units: Sequence[Unit],
    costs: Costs,
    request: PlacementRequest,
    owners: Mapping[int, int],
    pins: Sequence[int | None],
    held: Sequence[int],
    memory_limit: int | None,
) -> ChainSolution:
    placed = _placed_by_script(units, request)
    asked = [stage if pin is None else pin for stage, pin in zip(placed, pins, strict=True)]
    chain = Chain.of([unit.name for unit in units], asked, costs)
    decided = any(pin is not None for pin in pins)
    if not decided or any(pin is None and unit.variables for unit, pin in zip(units, pins, strict=True)):
        try:
            return solve_chain(
                chain,
                request.stages,
                objective=request.objective,
                microbatches=request.microbatches,
                in_flight=held,
                memory_limit=memory_limit,
            )
        except PlacementError:
            if not decided:
                raise
    # What an earlier step decided leaves no choice; a step that uses a part of the models leaves stages empty.
    return follow_owners(chain, request.stages, owners, request.microbatches)


def _as_given(
    graph: OpGraph,
    units: Sequence[Unit],
    costs: Costs,
    given: StoredPlan,
    request: PlacementRequest,
    owners: Mapping[int, int],
    held: Sequence[int],
) -> ChainSolution:
    """What a plan file says of the units, all of which it names, in order.

    Raises:
        PlacementError: an earlier step or the script says something else, or a partition is left without a layer.
    """
    placed = [given.units[unit.name] for unit in units]
    for unit, stage, pin in zip(units, placed, _pins(units, owners), strict=True):
        if pin not in (None, stage):
            raise PlacementError(
                f"The plan that was loaded puts {unit.name!r} on partition {stage}. An earlier step put its variables "
                f"on partition {pin}, where they stay: change one of the two plans in the file."
            )
        if unit.stage not in (None, stage):
            raise PlacementError(
                f"The plan that was loaded puts {unit.name!r} on partition {stage}, and smp.partition in the script on "
                f"{unit.stage}. Change one of them, or make the plan anew."
            )
    empty = sorted(set(range(request.stages)) - set(placed))
    if empty and not owners:
        raise PlacementError(
            f"The plan that was loaded puts no layer on partition {', '.join(map(str, empty))} of {request.stages}. "
            f"Every partition needs one."
        )
    decided = dict(owners)
    for weight in costs.weights:
        name = graph.variables[weight.variable].name
        used_on = sorted({placed[user] for user in weight.users})
        if len(used_on) > 1 and weight.variable not in decided:
            decided[weight.variable] = given.shared.get(name, used_on[0])
            if decided[weight.variable] not in used_on:
                raise PlacementError(
                    f"The plan that was loaded gives {name!r} to partition {decided[weight.variable]}, whose layers do "
                    f"not use it. Those of partitions {' and '.join(map(str, used_on))} do."
                )
    chain = Chain.of([unit.name for unit in units], placed, costs)
    return follow_owners(chain, request.stages, decided, request.microbatches, held)


def _placed_by_script(units: Sequence[Unit], request: PlacementRequest) -> list[int | None]:
    """The stage that the script asked for each unit, or None.

    Raises:
        PlacementError: all units are placed, and data would come back to a stage, or a stage has none.
    """
    if request.stages == 1:
        return [None] * len(units)
    if request.default is None:
        return [unit.stage for unit in units]
    placed = [request.default if unit.stage is None else unit.stage for unit in units]
    for (before, first), (unit, second) in pairwise(zip(units, placed, strict=True)):
        if second < first:
            raise PlacementError(
                f"auto_partition is false, and {unit.name!r} is {_why(unit, second)}, while what comes before it, "
                f"{before.name!r}, is {_why(before, first)}. Every partition is one run of the layers in the order in "
                f"which data flows: it cannot come back to an earlier partition. Place both with smp.partition, in "
                f"order."
            )
    empty = sorted(set(range(request.stages)) - set(placed))
    if empty:
        raise PlacementError(
            f"auto_partition is false, and no layer is on partition {', '.join(map(str, empty))} of {request.stages}. "
            f"Place one there with smp.partition, or use fewer partitions."
        )
    return list(placed)


def _why(unit: Unit, stage: int) -> str:
    if unit.stage is None:
        return f"outside any smp.partition, and so on default_partition {stage}"
    return f"on partition {stage}"


def _pins(units: Sequence[Unit], owners: Mapping[int, int]) -> list[int | None]:
    """The stage that owns each unit's variables, where an earlier step decided it.

    A variable that several units use pins none of them: whoever does not own it reads it remotely, as in the step that
    decided.
    """
    users = Counter(v for unit in units for v in unit.variables)
    return [max((owners[v] for v in unit.variables if v in owners and users[v] == 1), default=None) for unit in units]


def cut_into_units(graph: OpGraph) -> tuple[tuple[Unit, ...], Split]:
    """The units of a step, and the step cut so that each of them is a stage of its own.

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
) -> Split:
    """Cut a step as a plan says.

    Args:
        graph: the pruned op graph.
        plan: where its units and variables go.
        local_outputs: positions of outputs that stay with the stage that makes them.
        composites: positions of outputs that are parts of one composite tensor.

    Returns:
        The segments and transfers of all stages.
    """
    units = units_of(graph)
    stages = plan.stages_of(units)
    stage_of = {number: stages[unit.index] for unit in units for number in unit.nodes}
    owners = {v.index: plan.owners[v.name] for v in graph.variables if v.name in plan.owners}
    assignment = assign(graph, plan.stages, stage_of, owners)
    summed = sum_before_sending(assignment)
    if summed is not graph:
        # Nodes were added: those of units are found again by name, which is unique.
        named = {graph.nodes[number].name: stage for number, stage in stage_of.items()}
        again = {number: named[node.name] for number, node in enumerate(summed.nodes) if node.name in named}
        assignment = assign(summed, plan.stages, again, owners)
    return split(assignment, local_outputs, composites)


def with_exact_transfers(plan: Plan, done: Split, samples: int = 1) -> Plan:
    """The plan with the stash, transfers and working sets that its cut really has in place of the estimates.

    Args:
        plan: the plan.
        done: the step, cut by it.
        samples: samples of a microbatch, where the graph leaves that length open.
    """
    forecast = tuple(_exact(stage, row, done, samples) for stage, row in enumerate(plan.forecast))
    return dataclasses.replace(plan, forecast=forecast)


def _exact(stage: int, row: StageForecast, done: Split, samples: int) -> StageForecast:
    graph = done.graph

    def nbytes(tensors: Iterable[Tensor | None]) -> int:
        return sum(graph.type_of(t).nbytes(samples) for t in tensors if t is not None)

    sent = [t for t in done.transfers if t.src_stage == stage and not t.once_per_step and t.tensor is not None]
    forward = [t for t in sent if t.dst_stage > stage]
    backward = [t for t in sent if t.dst_stage < stage]
    received = [t.tensor for t in done.transfers if t.dst_stage == stage and not t.once_per_step]
    stash = nbytes(t for t in done.stash(stage) if not _is_weight(done.assignment, t.node))
    summed = [t for o in done.outputs if o.is_summed for t in o.summands or (o.tensor,)]
    working = [working_set(graph, s, summed, samples) for (of, _), s in done.segments.items() if of == stage]
    return dataclasses.replace(
        row,
        stash_bytes=stash * row.in_flight,
        working_bytes=nbytes(received) + max(working, default=0),
        sent_forward=nbytes(t.tensor for t in forward),
        sent_backward=nbytes(t.tensor for t in backward),
        messages_forward=len(forward),
        messages_backward=len(backward),
    )


def _is_weight(assignment: Assignment, node: int) -> bool:
    place = assignment.places[node]
    return place.role is Role.HOME and assignment.graph.nodes[node].op == "ReadVariableOp"

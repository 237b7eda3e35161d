"""Takes a pruned step to a cut one: places the units, agrees on the plan with all ranks, cuts.

Ownership is decided once per model, by the first step that uses it. A later step (evaluation, another batch shape)
keeps every variable where it is, and places its ops around them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.fingerprint import fingerprint
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.place.place import Placed, place
from smp_tf.partition.place.placement import Chain, Chunks, Placement, Ranks, check_units
from smp_tf.partition.place.solve_chain import follow_owners
from smp_tf.partition.place.solve_dag import MOST_CHOICES
from smp_tf.partition.plan.plan import Plan, make_plan
from smp_tf.partition.plan.plan_file import StoredPlan
from smp_tf.partition.split.assign import assign
from smp_tf.partition.split.split import Split, split
from smp_tf.partition.split.sums import sum_before_sending
from smp_tf.partition.units.cost import Costs, Machine, estimate, with_measured
from smp_tf.partition.units.recompute import group_units, groups_of_nodes, needed_again, with_recompute
from smp_tf.partition.units.units import AFTER_MODEL, Unit, build_units, dependences, ordered_by_chunk, weight_derived
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.planner.times_by_size import other_sizes
from smp_tf.pipeline.programs.stash import stash_profile
from smp_tf.pipeline.schedules.schedule import placement_of, program_of
from smp_tf.pipeline.task import Kind


@dataclass(frozen=True)
class PlacementRequest:
    """What the placement of a step depends on besides its graph.

    Args:
        stages: number of stages.
        microbatches: number of microbatches.
        schedule: name or text of the schedule.
        objective: "memory" or "speed".
        slots: optimizer slots per trainable variable, in sizes of the variable.
        samples: samples of a microbatch, where the graph leaves that length open.
        measured: seconds forward and backward of units that were measured, by name.
        default: where the script places all layers, the stage of those it has not placed; else None.
        given: the plan of a file, which leaves no choice; else None.
        ranks: how the ranks of the stages differ, and what they may need; None where they are alike, without limit.
        machine: speeds that costs are estimated by, in times of which those of the ranks are.
        proof_seconds: for how long to look for a placement that no cut of one order gives; 0 for not at all.
        thorough: look also where there is little to gain.
        advise: where nothing fits, look for what would.
        others: gives, in words, numbers of microbatches that are not tried here and with which it fits; None where
            nothing else can be tried.
        more_partitions: gives, in words, larger numbers of stages with which it fits, where the ranks for them are
            known; None where they are taken to be as the others.
        local_outputs: positions of outputs that stay with the stage that makes them.
        composites: positions of outputs that are parts of one composite tensor.
        chunks_per_rank: how many chunks of the model each rank has; None for as few as the schedule takes.
        placement: the stage of every chunk, where that is not the schedule's; else None.
        contiguous: whether every stage is one run of the units, where the schedule has one chunk on each.
        slot_shares: among how many replicas the slots of a stage are shared.
        replicas: how many train at the same time.
        averaging_bytes: memory through which every rank averages gradients; see `data_parallel.averaging_bytes`.
        gradients_on_host, slots_on_host: whether these are in the host's memory instead of the device's.
        measured_sizes: where measured times are drawn from microbatches of other sizes, the samples of those.
        recompute: whether backward makes again what forward made, in place of keeping it.
        alone: what share of the measured times units take, forward and backward, while the other ranks of a host wait.
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
    ranks: Ranks | None = None
    machine: Machine | None = None
    proof_seconds: float = 0.0
    thorough: bool = False
    advise: bool = True
    others: Callable[[], Iterable[str]] | None = None
    more_partitions: Callable[[Iterable[int]], Iterable[str]] | None = None
    local_outputs: frozenset[int] = frozenset()
    composites: Sequence[tuple[int, ...]] = ()
    chunks_per_rank: int | None = None
    placement: tuple[int, ...] | None = None
    contiguous: bool = True
    slot_shares: int = 1
    replicas: int = 1
    averaging_bytes: int = 0
    gradients_on_host: bool = False
    slots_on_host: bool = False
    measured_sizes: Sequence[int] = ()
    recompute: bool = False
    alone: tuple[float, float] = (1.0, 1.0)

    @property
    def chunks(self) -> Chunks:
        """Where chunks are, and what stages keep of them.

        Raises:
            PlacementError: the schedule has no order for chunks that are placed as an earlier step or a file says.
            ScheduleError: it is not defined for so many stages and microbatches.
        """
        placement = self.placement or placement_of(self.schedule, self.stages, self.chunks_per_rank)
        try:
            return _chunks_of(self.schedule, placement, self.microbatches)
        except ScheduleError as error:
            if self.placement is None:
                raise
            raise PlacementError(f"pipeline and the places of the chunks do not go together. {error}") from None

    def like(self, plan: Plan) -> PlacementRequest:
        """Returns the same for another step, whose chunks are where a plan has them and which has its schedule.

        Args:
            plan: of a step of another replica.
        """
        return dataclasses.replace(self, placement=plan.placement, schedule=plan.schedule, contiguous=True)

    @property
    def limits(self) -> tuple[float | None, ...]:
        """Bytes that each stage may need, or None."""
        return self.ranks.memory if self.ranks is not None else (None,) * self.stages


@functools.lru_cache(maxsize=64)
def _chunks_of(schedule: str, placement: tuple[int, ...], microbatches: int) -> Chunks:
    return Chunks(placement, stash_profile(program_of(schedule, placement, microbatches)))


#: Of layers that were moved by hand, so many are named.
_MOST_MOVED = 8
#: For how long a step looks for a placement that no cut of one order gives, and for a proof that there is none.
PROOF_SECONDS = 2.0
#: Units times stages that take no longer than that.
_QUICK_CHOICES = 2_000
#: Bytes, and seconds of a step, for which a training does not wait a second longer for its plan.
_WORTH = {"memory": 2.0**20, "speed": 1e-3}


def prune(graph: OpGraph) -> OpGraph:
    """Returns the graph with the ops that an output, an effect, or the placement of a trained weight needs."""
    wanted = [t.node for t in graph.outputs] + [n for n, node in enumerate(graph.nodes) if node.stateful]
    wanted += _only_uses_of_trained(graph, graph.ancestors(wanted))
    return graph.subgraph(graph.ancestors(wanted))


def _only_uses_of_trained(graph: OpGraph, needed: Collection[int]) -> list[int]:
    """Returns forward ops that use a weight whose gradient is needed, where none of them is needed itself.

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
    """Returns the units to place: those of the model, the last of them with the loss, which is no stage of its own."""
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


def planned(graph: OpGraph, request: PlacementRequest, owners: Mapping[int, int]) -> Plan:
    """Places the units of a model, by what is known of them before the model is cut.

    Args:
        graph: the pruned op graph of a step.
        request: how many stages, and what to balance.
        owners: chunk of variables whose owner an earlier step decided, by index.

    Returns:
        The plan; what stages receive ahead and work with is not in its forecast.

    Raises:
        PlacementError: the model has too few units, it is not the one of the plan that is given, or data would have to
            flow backwards between the owners that an earlier step decided.
        MemoryLimitError: some rank would need more than it may.
    """
    units = units_of(graph)
    if request.given is not None:
        at = {name: position for position, name in enumerate(request.given.units)}
        units = tuple(
            dataclasses.replace(unit, index=index)
            for index, unit in enumerate(sorted(units, key=lambda unit: at[unit.name]))
        )
    elif owners:
        units = ordered_by_chunk(graph, units, _pins(units, owners))
    else:
        # Before there are schedules and costs of so many stages.
        check_units([unit.name for unit in units], request.stages)
    costs, known = _costs_of(graph, units, request)
    chunks = request.chunks
    gap, without = None, None
    if request.given is not None:
        solution = _as_given(graph, units, costs, request.given, request, owners, chunks)
        owners = {**solution.owners, **owners}
    else:
        placed = _solve(graph, units, costs, request, owners, chunks)
        solution, gap, without = placed.placement, placed.gap, placed.without
        if any(later < chunk for chunk, later in pairwise(solution.chunk_of)):
            units = ordered_by_chunk(graph, units, solution.chunk_of)
            costs, known = _costs_of(graph, units, request)
            chain = Chain.of([unit.name for unit in units], costs, pinned=sorted(solution.chunk_of))
            solution = follow_owners(
                chain, request.stages, solution.owners, request.microbatches, chunks, request.ranks
            )
    if costs.groups:
        groups = needed_again(_whole(costs.groups), solution.chunk_of, chunks.most_of_each)
        if groups != costs.groups:
            costs, known = _costs_of(graph, units, request, groups)
            # Of the costs that the solver has seen something is proved, and not of these.
            gap, without = None, "some layers turned out not to be made again"
    plan = make_plan(
        graph,
        units,
        costs,
        solution,
        chunks=chunks,
        microbatches=request.microbatches,
        schedule=request.schedule,
        objective=request.objective,
        fingerprint=fingerprint(graph),
        owners=owners,
        gap=gap,
        speed=request.ranks.speed if request.ranks is not None else None,
        slot_shares=request.slot_shares,
    )
    if without is not None:
        said = f"no more is proved of this placement: {without}"
        plan = dataclasses.replace(plan, reasons=(*plan.reasons, said))
    if request.given is not None:
        plan = dataclasses.replace(plan, reasons=(*plan.reasons, _loaded(request.given, plan.fingerprint)))
    if request.recompute and graph.gradients:
        plan = dataclasses.replace(plan, reasons=(*plan.reasons, _made_again(plan, costs)))
    if known:
        said = f"the times are measured ones, of {known} of the {len(units)} units"
        if request.measured_sizes:
            which = other_sizes(request.measured_sizes)
            said = f"the times of {known} of the {len(units)} units are by measured ones of {which}"
        plan = dataclasses.replace(plan, reasons=(*plan.reasons, said))
    if costs.alone != (1.0, 1.0):
        forward, backward = (f"{share:.0%}" for share in costs.alone)
        said = (
            f"while other ranks of its host wait, layers take {forward} of their time forward, {backward} backward: "
            f"so the step is foreseen, while placements are compared by the times beside others"
        )
        plan = dataclasses.replace(plan, reasons=(*plan.reasons, said))
    return plan


def _loaded(given: StoredPlan, own: str) -> str:
    """Returns that a plan was loaded, whether for another step, and what has been moved in it by hand.

    Args:
        given: the plan.
        own: the fingerprint of the step that it is used for.
    """
    said = "the placement is that of the plan that was loaded"
    if given.fingerprint != own:
        said += f", which was made for step {given.step!r} with other batches, constants or operations"
    moved = given.moved()
    if not moved:
        return said
    more = f", and {len(moved) - _MOST_MOVED} more" if len(moved) > _MOST_MOVED else ""
    return f"{said}; moved by hand: {', '.join(moved[:_MOST_MOVED])}{more}"


def _made_again(plan: Plan, costs: Costs) -> str:
    """Returns what is made again in backward, and what that costs, in words."""
    again = sum(cost.time_remade for cost in costs.units)
    rest = sum(cost.time_forward + cost.time_backward for cost in costs.units) - again
    count = sum(cost.time_remade > 0 for cost in costs.units)
    if not count:
        return "recompute: nothing is made again, since no less would be kept"
    groups = len({(plan.units[name], group) for name, group in plan.recompute.items()})
    many = "1 group" if groups == 1 else f"{groups} groups"
    return (
        f"recompute: backward makes again what {count} of the {len(plan.units)} units keep otherwise, in {many}; that "
        f"is {again / (rest or 1.0):.0%} more to compute"
    )


def costs_of(graph: OpGraph, request: PlacementRequest, plan: Plan | None = None) -> tuple[tuple[Unit, ...], Costs]:
    """Returns the units of a step, and what each costs for one microbatch.

    Args:
        graph: the pruned op graph.
        request: what the costs depend on besides.
        plan: the plan of the step, by which it is known what backward makes again; None while there is none.
    """
    units = units_of(graph)
    groups = tuple(plan.recompute.get(unit.name) for unit in units) if plan is not None else None
    return units, _costs_of(graph, units, request, groups)[0]


def _costs_of(
    graph: OpGraph,
    units: Sequence[Unit],
    request: PlacementRequest,
    groups: tuple[int | None, ...] | None = None,
) -> tuple[Costs, int]:
    """Returns the costs, and how many of the units were measured.

    Args:
        graph: the pruned op graph.
        units: those of the step, in an order.
        request: what the costs depend on besides.
        groups: the group of every unit that backward makes again; None where it is open which do.
    """
    costs = estimate(
        graph,
        units,
        # While it is open which variables a stage gets, shares count as equal.
        slots=request.slots / request.slot_shares,
        microbatches=request.microbatches,
        machine=request.machine,
        unknown=request.samples,
    )
    costs = costs.on_host(gradients=request.gradients_on_host, slots=request.slots_on_host)
    costs, known = with_measured(costs, units, request.measured, request.alone)
    if request.recompute and graph.gradients:
        groups = groups or group_units(costs, max(request.chunks.in_flight) / request.stages)
        costs = with_recompute(costs, graph, units, groups)
    return costs, known


def _whole(groups: Sequence[int | None]) -> list[int]:
    """Returns the groups of which each unit has one."""
    return [group for group in groups if group is not None]


def _solve(
    graph: OpGraph,
    units: Sequence[Unit],
    costs: Costs,
    request: PlacementRequest,
    owners: Mapping[int, int],
    chunks: Chunks,
) -> Placed:
    pins = _pins(units, owners)
    placed = _placed_by_script(units, request, bool(owners))
    # What an earlier step decided counts more than what the script says of the layer now.
    manual = [stage if pin is None else None for stage, pin in zip(placed, pins, strict=True)]
    chain = Chain.of([unit.name for unit in units], costs, manual=manual, pinned=pins)
    decided = any(pin is not None for pin in pins)
    if not decided or any(pin is None and unit.variables for unit, pin in zip(units, pins, strict=True)):
        try:
            return place(
                chain,
                dependences(graph, [unit.nodes for unit in units]).edges,
                request.stages,
                objective=request.objective,
                microbatches=request.microbatches,
                ranks=request.ranks,
                chunks=chunks,
                seconds=0.0 if decided else request.proof_seconds,
                worth=0.0 if request.thorough else _WORTH.get(request.objective, 0.0),
                most_choices=MOST_CHOICES if request.thorough else _QUICK_CHOICES,
            )
        except PlacementError:
            if not decided:
                raise
    # What an earlier step decided leaves no choice; a step that uses a part of the models leaves chunks empty.
    return Placed(follow_owners(chain, request.stages, owners, request.microbatches, chunks, request.ranks), None)


def _as_given(
    graph: OpGraph,
    units: Sequence[Unit],
    costs: Costs,
    given: StoredPlan,
    request: PlacementRequest,
    owners: Mapping[int, int],
    chunks: Chunks,
) -> Placement:
    """Returns what a plan file says of the units, all of which it names, in order.

    Raises:
        PlacementError: an earlier step or the script says something else, or a partition is left without a layer.
    """
    placed = [given.units[unit.name] for unit in units]
    if chunks.placement != given.placement:
        raise PlacementError(
            f"The plan that was loaded has chunks on partitions {list(given.placement)}, and what an earlier step "
            f"placed is in chunks on partitions {list(chunks.placement)}: change one of the two plans in the file."
        )
    for unit, chunk, pin in zip(units, placed, _pins(units, owners), strict=True):
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
    empty = sorted(set(range(request.stages)) - {chunks.placement[chunk] for chunk in placed})
    if empty and not owners:
        raise PlacementError(
            f"The plan that was loaded puts no layer on partition {', '.join(map(str, empty))} of {request.stages}. "
            f"Every partition needs one."
        )
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
    chain = Chain.of([unit.name for unit in units], costs, pinned=placed)
    return follow_owners(chain, request.stages, decided, request.microbatches, chunks, request.ranks)


def _placed_by_script(units: Sequence[Unit], request: PlacementRequest, decided: bool) -> list[int | None]:
    """Returns the stage that the script asked for each unit, or None.

    Args:
        units: those of the step.
        request: what it asks for besides.
        decided: whether an earlier step has placed variables of this one, which may use a part of the models.

    Raises:
        PlacementError: there is no such stage; or all units are placed, and data would come back to a stage, or a stage
            has none.
    """
    if request.stages == 1:
        return [None] * len(units)
    _require_partitions(units, request.stages)
    if request.default is None:
        return [unit.stage for unit in units]
    placed, runs = _by_hand(units, request.default), request.chunks.are_stages
    for (before, first), (unit, second) in pairwise(zip(units, placed, strict=True)):
        if second < first and runs and not decided:
            raise PlacementError(
                f"auto_partition is false, and {unit.name!r} is {_why(unit, second)}, while what comes before it, "
                f"{before.name!r}, is {_why(before, first)}. Every partition is one run of the layers in the order in "
                f"which data flows: it cannot come back to an earlier partition. Place both with smp.partition, in "
                f"order, or set contiguous to false."
            )
    empty = sorted(set(range(request.stages)) - set(placed))
    if empty and not decided:
        raise PlacementError(
            f"auto_partition is false, and no layer is on partition {', '.join(map(str, empty))} of {request.stages}. "
            f"Place one there with smp.partition, or use fewer partitions."
        )
    return list(placed)


def _require_partitions(units: Sequence[Unit], stages: int) -> None:
    """Raises where the script has placed a unit on a partition that there is not."""
    for unit in units:
        if unit.stage is not None and not 0 <= unit.stage < stages:
            raise PlacementError(
                f"{unit.name!r} was placed on partition {unit.stage}. There are {stages}: use 0 to {stages - 1}."
            )


def _by_hand(units: Sequence[Unit], default: int) -> list[int]:
    return [default if unit.stage is None else unit.stage for unit in units]


def placement_by_hand(graph: OpGraph, request: PlacementRequest) -> tuple[int, ...] | None:
    """Returns the stage of every chunk, where the script comes back to a partition; None where it does not.

    Args:
        graph: the pruned op graph.
        request: what the script asks for besides.

    Raises:
        PlacementError: it comes back to a partition, and has no layer on another.
    """
    units = units_of(graph)
    _require_partitions(units, request.stages)
    by_script = [unit.stage for unit in units if unit.stage is not None]
    placed = by_script if request.default is None else _by_hand(units, request.default)
    runs = tuple(stage for stage, _ in groupby(placed))
    if all(first < second for first, second in pairwise(runs)):
        return None
    empty = sorted(set(range(request.stages)) - set(runs))
    if empty:
        raise PlacementError(
            f"smp.partition comes back to a partition, as contiguous = false allows, and no layer is on partition "
            f"{', '.join(map(str, empty))} of {request.stages}. Place one there, or use fewer partitions."
        )
    return runs


def _why(unit: Unit, stage: int) -> str:
    if unit.stage is None:
        return f"outside any smp.partition, and so on default_partition {stage}"
    return f"on partition {stage}"


def _pins(units: Sequence[Unit], owners: Mapping[int, int]) -> list[int | None]:
    """Returns the chunk that owns each unit's variables, where an earlier step decided it.

    A variable that several units use pins none of them: whoever does not own it reads it remotely, as in the step that
    decided.
    """
    users = Counter(v for unit in units for v in unit.variables)
    return [max((owners[v] for v in unit.variables if v in owners and users[v] == 1), default=None) for unit in units]


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
) -> Split:
    """Cuts a step as a plan says.

    Args:
        graph: the pruned op graph.
        plan: where its units and variables go.
        local_outputs: positions of outputs that stay with the stage that makes them.
        composites: positions of outputs that are parts of one composite tensor.

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
        # Nodes were added: those of units are found again by name, which is unique.
        at = {node.name: number for number, node in enumerate(summed.nodes)}
        chunk_of = {at[graph.nodes[number].name]: chunk for number, chunk in chunk_of.items()}
        recompute = {at[graph.nodes[number].name]: group for number, group in recompute.items()}
        assignment = assign(summed, count, chunk_of, owners, placement)
    program = program_of(plan.schedule, placement, plan.microbatches)
    in_two = {task.chunk for tasks in program for task in tasks if task.kind is Kind.W}
    return split(assignment, local_outputs, composites, cut_backward=in_two, recompute=recompute)

"""The plan: the chunk of each unit and variable, the stage of each chunk, and what this is forecast to cost.

A plan is data. Rank 0 makes it, the others receive it as text, and the report prints it. A file (`plan_file`) keeps the
parts that people may want to read and to change:

    Units, Costs, Placement ──▶ Plan ──▶ JSON ──▶ Plan ──▶ chunks of the units of another trace
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.place.placement import Chunks, Placement
from smp_tf.partition.place.slot_shares import Sized, fullest_share
from smp_tf.partition.place.trade import Trade
from smp_tf.partition.plan.held_memory import HeldMemory
from smp_tf.partition.plan.json_record import record_from
from smp_tf.partition.plan.stage_forecast import Memory, StageForecast, Traffic, Use
from smp_tf.partition.units.cost import Costs
from smp_tf.partition.units.units import Unit

VERSION = 6
#: The most bytes of a plan. A thousand layers and their variables take about 0.3 MiB.
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class SharedVariable:
    """A variable that several units use.

    Args:
        name: the variable.
        owner: stage that stores it.
        copies: other stages that use it. Each receives the value and returns a gradient once per step. Empty when all
            uses are on the owner.
        nbytes: bytes of the value.
    """

    name: str
    owner: int
    copies: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """A placement of a model over stages.

    Args:
        stages: number of stages.
        microbatches: number of microbatches that it was made for.
        schedule: the schedule that it was made for, as its name, or as the text of one without a name.
        objective: what was balanced, "memory" or "speed".
        fingerprint: hash of the step that it was made for.
        placement: the stage of every chunk; where each stage has one chunk, 0, 1, 2 and so on.
        units: chunk of every unit, by the unit's name, in topological order.
        owners: chunk of every variable of the model, by name.
        shared: variables with more than one user.
        forecast: one entry for each stage.
        defaulted: op types whose cost was guessed.
        reasons: what decided the placement, besides the stage that has most, one sentence each.
        gap: by how much any other placement can be better in what was balanced than the best balanced one that was
            found, as a share; None where nothing is proved, as for a placement that was given.
        trade: what the placement gives up in balance for fewer bytes sent; None where nothing was to be given up.
        recompute: the group of each unit whose forward is made again in backward, by the unit's name.
        earlier: what the rank of each stage held in an earlier training by the same plan; empty where this is unknown.
    """

    stages: int
    microbatches: int
    schedule: str
    objective: str
    fingerprint: str
    placement: tuple[int, ...]
    units: dict[str, int]
    owners: dict[str, int]
    shared: tuple[SharedVariable, ...] = ()
    forecast: tuple[StageForecast, ...] = ()
    defaulted: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    gap: float | None = None
    trade: Trade | None = None
    recompute: dict[str, int] = dataclasses.field(default_factory=dict)
    earlier: tuple[HeldMemory, ...] = ()

    def to_json(self) -> str:
        """Returns the plan as text, always in the same form, with one unit or variable per line."""
        fields = {"version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads a plan.

        Args:
            text: what `to_json` gave.

        Returns:
            An equal plan.

        Raises:
            PlacementError: the text is too long, not JSON, or of another version, or a field is missing, unknown or
                mistyped.
        """
        if len(text.encode()) > MAX_BYTES:
            raise PlacementError(f"A plan has at most {MAX_BYTES} bytes. Received: {len(text.encode())} bytes.")
        try:
            fields = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlacementError(f"A plan must be JSON. {error}.") from None
        if not isinstance(fields, dict):
            raise PlacementError(f"A plan must be a JSON object. Received: {type(fields).__name__}.")
        version = fields.pop("version", None)
        if version != VERSION:
            raise PlacementError(
                f"This release reads plans of version {VERSION}. Received: version {version!r}. Make the plan anew."
            )
        plan = record_from(cls, fields, "the plan")
        chunks = len(plan.placement)
        if sorted(set(plan.placement)) != list(range(plan.stages)) or len(plan.forecast) not in (0, plan.stages):
            raise PlacementError(
                f"A plan of {plan.stages} stages must have chunks on stages 0 to {plan.stages - 1} and forecast each. "
                f"Received: chunks on {plan.placement}, forecasts: {len(plan.forecast)}."
            )
        if len(plan.earlier) not in (0, plan.stages):
            raise PlacementError(
                f"A plan of {plan.stages} stages must say of each what it held earlier, or of none. Received: "
                f"{len(plan.earlier)} entries."
            )
        wrong = [chunk for chunk in (*plan.units.values(), *plan.owners.values()) if not 0 <= chunk < chunks]
        if wrong:
            raise PlacementError(f"A plan of {chunks} chunks must name chunks 0 to {chunks - 1}. Received: {wrong[0]}.")
        return plan

    @property
    def placement_key(self) -> str:
        """Returns a hash of where everything is, and of the order in which it runs."""
        where = [self.schedule, self.placement, self.microbatches, self.units, self.owners, self.recompute]
        return hashlib.sha256(json.dumps(where, sort_keys=True).encode()).hexdigest()

    @property
    def schedule_name(self) -> str:
        """Returns the schedule in a word or two."""
        return "own schedule" if self.schedule[:1].isdigit() else self.schedule

    @property
    def has_one_chunk_each(self) -> bool:
        """Returns whether each stage has one chunk, and the chunks are in the order of the stages."""
        return self.placement == tuple(range(self.stages))

    def stage_of(self, name: str) -> int:
        """Returns the stage of the unit with a name."""
        return self.placement[self.units[name]]

    def stages_of(self, units: Iterable[Unit]) -> tuple[int, ...]:
        """Returns the stage of each of the given units, by name.

        Raises:
            PlacementError: a unit is not in the plan: it was made for another model.
        """
        return tuple(self.placement[chunk] for chunk in self.chunks_of(units))

    def chunks_of(self, units: Iterable[Unit]) -> tuple[int, ...]:
        """Returns the chunk of each of the given units, by name.

        Raises:
            PlacementError: a unit is not in the plan: it was made for another model.
        """
        found = []
        for unit in units:
            if unit.name not in self.units:
                raise PlacementError(
                    f"The plan does not say where {unit.name!r} goes: it was made for another "
                    f"model. "
                    f"It names {len(self.units)} layers, the first of them "
                    f"{next(iter(self.units), None)!r}."
                )
            found.append(self.units[unit.name])
        return tuple(found)


@dataclass(frozen=True)
class Terms:
    """What a placement was made for.

    Args:
        chunks: where the chunks are, and what stages keep.
        microbatches: number of microbatches.
        schedule: name of the schedule.
        objective: "memory" or "speed".
        speed: speeds of the ranks of all stages, as multiples of the speed that the costs are for; None where they are
            alike.
        slot_shares: number of replicas that share the slots of a stage. The costs are those of equal shares.
    """

    chunks: Chunks
    microbatches: int
    schedule: str
    objective: str
    speed: Sequence[float] | None = None
    slot_shares: int = 1


def make_plan(
    graph: OpGraph,
    units: Sequence[Unit],
    costs: Costs,
    solution: Placement,
    terms: Terms,
    *,
    fingerprint: str,
    owners: Mapping[int, int] | None = None,
    gap: float | None = None,
) -> Plan:
    """Writes down a placement with its forecast.

    Args:
        graph: the step.
        units: its units.
        costs: their costs.
        solution: the placement.
        terms: what it was made for.
        fingerprint: hash of the step.
        owners: chunks of all variables of the model, where more is known than the cuts say, such as about variables
            that no unit uses.
        gap: by how much any other placement can be better, as in `Plan`.

    Returns:
        The plan. Its forecast is estimated from op types and shapes.
    """
    chunks = terms.chunks
    owner_of = {**solution.owners, **(owners or {})}
    shared = []
    for weight in costs.weights:
        if len(weight.users) > 1:
            used_on = {solution.stage_of[u] for u in weight.users}
            owner = chunks.placement[owner_of[weight.variable]]
            name = graph.variables[weight.variable].name
            shared.append(SharedVariable(name, owner, tuple(sorted(used_on - {owner})), int(weight.value)))
    largest = _largest(units, costs, solution, chunks, terms.objective)
    speeds = terms.speed or (1.0,) * chunks.stages
    forecast = _forecast(graph, costs, solution, owner_of, chunks, largest, speeds, terms.slot_shares)
    return Plan(
        stages=chunks.stages,
        microbatches=terms.microbatches,
        schedule=terms.schedule,
        objective=terms.objective,
        fingerprint=fingerprint,
        placement=chunks.placement,
        units={unit.name: solution.chunk_of[unit.index] for unit in units},
        owners={graph.variables[v].name: chunk for v, chunk in sorted(owner_of.items())},
        shared=tuple(shared),
        forecast=forecast,
        defaulted=costs.defaulted,
        gap=gap,
        recompute={u.name: group for u, group in zip(units, costs.groups, strict=False) if group is not None},
    )


def _forecast(
    graph: OpGraph,
    costs: Costs,
    solution: Placement,
    owner_of: Mapping[int, int],
    chunks: Chunks,
    largest: Sequence[tuple[str, float]],
    speed: Sequence[float],
    slot_shares: int,
) -> tuple[StageForecast, ...]:
    """Returns the costs summed per stage. A tensor counts once for each stage that receives or keeps it."""
    stages, stage_of = chunks.stages, solution.stage_of
    times, units = [0.0] * stages, [0] * stages
    for unit, cost in enumerate(costs.units):
        times[stage_of[unit]] += cost.seconds.both / speed[stage_of[unit]]
        units[stage_of[unit]] += 1
    whole = sum(times) or 1.0
    stash_of = [0.0] * len(chunks.placement)
    for stash in costs.stashes:
        for chunk in {solution.chunk_of[r] for r in stash.readers}:
            stash_of[chunk] += stash.nbytes
    stored = _stored(graph, costs, solution, owner_of, chunks, slot_shares)
    parameters = _parameters(graph, costs, owner_of, chunks)
    held, traffic = chunks.stash(stash_of), _traffic(costs, solution, stages)
    return tuple(
        StageForecast(
            units[r],
            parameters[r],
            stored[r] | {Use.STASH: int(held[r])},
            chunks.in_flight[r],
            round(times[r] / whole, 4),
            traffic[r],
            *largest[r],
        )
        for r in range(stages)
    )


def _parameters(graph: OpGraph, costs: Costs, owner_of: Mapping[int, int], chunks: Chunks) -> list[int]:
    """Returns how many numbers are in the variables that each stage owns."""
    counts = [0] * chunks.stages
    for weight in costs.weights:
        shape = graph.variables[weight.variable].type.shape or ()
        counts[chunks.placement[owner_of[weight.variable]]] += math.prod(dim or 1 for dim in shape)
    return counts


def _stored(
    graph: OpGraph,
    costs: Costs,
    solution: Placement,
    owner_of: Mapping[int, int],
    chunks: Chunks,
    slot_shares: int,
) -> list[Memory]:
    """Returns the bytes of weights, gradients and slots of each stage."""
    stages = range(chunks.stages)
    weights, gradients = [0.0 for _ in stages], [0.0 for _ in stages]
    shared: list[list[Sized]] = [[] for _ in stages]
    slots: list[list[float]] = [[] for _ in stages]
    trained = {gradient.variable for gradient in graph.gradients}
    for weight in costs.weights:
        owner = chunks.placement[owner_of[weight.variable]]
        if weight.variable in trained:
            shape = graph.variables[weight.variable].type.shape or ()
            # A variable whose shape is unknown is not cut.
            rows = shape[0] if shape and None not in shape else None
            shared[owner].append(Sized(weight.value, rows or 1))
            slots[owner].append(weight.slots * slot_shares)
        for stage in {owner} | {solution.stage_of[u] for u in weight.users}:
            weights[stage] += weight.value
            gradients[stage] += weight.gradient
    on_host = (Use.GRADIENTS,) * any(weight.is_gradient_on_host for weight in costs.weights)
    on_host += (Use.SLOTS,) * any(weight.are_slots_on_host for weight in costs.weights)
    return [
        Memory(
            {
                Use.WEIGHTS: int(weights[r]),
                Use.GRADIENTS: int(gradients[r]),
                Use.SLOTS: round(fullest_share(shared[r], slots[r], slot_shares)),
            },
            on_host,
        )
        for r in stages
    ]


def _traffic(costs: Costs, solution: Placement, stages: int) -> list[Traffic]:
    """Returns what each stage sends, estimated before the cut."""
    stage_of, chunk_of = solution.stage_of, solution.chunk_of
    sent = {True: [[0, 0.0] for _ in range(stages)], False: [[0, 0.0] for _ in range(stages)]}
    for flow in costs.flows:
        source = stage_of[flow.producer]
        for target in {stage_of[c] for c in flow.consumers} - {source}:
            first = min(chunk_of[c] for c in flow.consumers if stage_of[c] == target)
            ahead = first > chunk_of[flow.producer]
            sent[ahead][source][0] += 1
            sent[ahead][source][1] += flow.nbytes
    return [
        Traffic(int(sent[True][r][1]), int(sent[False][r][1]), int(sent[True][r][0]), int(sent[False][r][0]))
        for r in range(stages)
    ]


def _largest(
    units: Sequence[Unit], costs: Costs, solution: Placement, chunks: Chunks, objective: str
) -> list[tuple[str, float]]:
    """Returns, for each stage, the unit that has most of what is balanced, and the unit's share of it."""
    stored = {w.variable: w.stored for w in costs.weights}
    most = chunks.most_of_each

    def weight(unit: Unit) -> float:
        cost = costs.units[unit.index]
        if objective == "speed":
            return cost.seconds.both
        kept = most[solution.chunk_of[unit.index]] * cost.nbytes.stash
        return sum(stored[v] for v in cost.variables) + kept

    found = []
    for stage in range(chunks.stages):
        inside = [unit for unit in units if solution.stage_of[unit.index] == stage]
        largest = max(inside, key=weight, default=None)
        total = sum(map(weight, inside))
        found.append(("", 0.0) if largest is None or not total else (largest.name, round(weight(largest) / total, 4)))
    return found


def as_seconds(seconds: float) -> str:
    """Returns the seconds for people, such as "12 ms".

    Args:
        seconds: number of seconds.
    """
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms"


def as_bytes(count: float, up: bool = False) -> str:
    """Returns the bytes for people, such as "3.1 GiB".

    Args:
        count: number of bytes.
        up: whether to round up, so that the words never say less than the number.
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{math.ceil(count / size * 10) / 10 if up else count / size:.1f} {unit}"
    return f"{int(count)} B"

"""The file that keeps a script's plans, for people to read, to change and to run again.

The first step that uses a model decides where the model's variables are. The file has one plan for each such step, in
the order in which they came.

    {
     "version": 5,
     "partitions": 2,
     "plans": [
      {
       "step": "train",                                 name of the step function
       "fingerprint": "5fe1...",                        hash of the step it was made for
       "microbatches": 4, "pipeline": "interleaved", "optimize": "memory",          what it was made for
       "placement": [0, 1],                             partition of every chunk
       "units": {"net/dense": 0, "net/dense_1": 1},     chunk of every layer, in the order in which data flows
       "shared": {"net/embedding/table": 0},            owner of each variable that layers of several chunks use
       "planned": {...},                                placement, units and shared before any change by hand
       "variables": {"net/dense/kernel": "float32[64,512]"},
       "forecast": [...]                                what each partition holds; only for the reader
      }
     ]
    }

`placement`, `units` and `shared` say all: every other variable is owned by the chunk of the layer that uses it. So a
layer is moved by changing one number. `planned` stays as it is, and a training says what was moved. Where each
partition has one chunk, chunk and partition are the same number.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.fingerprint import type_in_words
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.json_record import Unreadable, in_words, parse, record_from
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.units.units import Unit, dependences

VERSION = 5
#: The most bytes of a plan file. A model of a thousand layers takes about 0.3 MiB.
MAX_BYTES = 16 * 2**20
#: The most partitions. More are a slip of the pen.
_MOST = 100_000


@dataclass(frozen=True, slots=True)
class Held:
    """What one partition is forecast to hold and to do. It is there for the reader only.

    Args:
        parameters: numbers in the variables it owns.
        bytes: bytes of weights, gradients, slots, stash and what is in flight.
        time_share: its share of the compute time of all partitions, 0 to 1.
    """

    parameters: int
    bytes: int
    time_share: float


@dataclass(frozen=True, slots=True)
class Planned:
    """What the planner has decided. It shows what was changed by hand.

    Args:
        placement: the partition of every chunk.
        first: the first layer of each chunk; "" for a chunk without a layer, which a step that uses a part of the
            models may have.
        shared: the owner of each variable that layers of several chunks use.
    """

    placement: tuple[int, ...]
    first: tuple[str, ...]
    shared: dict[str, int]


@dataclass(frozen=True)
class StoredPlan:
    """What the file says of one step, as in the picture above."""

    step: str
    fingerprint: str
    microbatches: int
    pipeline: str
    optimize: str
    recompute: bool
    placement: tuple[int, ...]
    units: dict[str, int]
    shared: dict[str, int]
    planned: Planned
    variables: dict[str, str]
    forecast: tuple[Held, ...]

    def planned_units(self) -> dict[str, int]:
        """Returns the chunk of every layer before any change by hand."""
        found, chunk = {}, 0
        for name in self.units:
            chunk = self.planned.first.index(name) if name in self.planned.first else chunk
            found[name] = chunk
        return found

    def moved(self) -> tuple[str, ...]:
        """Returns what was moved by hand, such as "net/dense from partition 1 to 0"."""
        old, new = self.planned.placement, self.placement
        pairs = enumerate(zip(old, new, strict=False))
        found = [f"chunk {chunk} from partition {before} to {now}" for chunk, (before, now) in pairs if before != now]
        if len(old) != len(new):
            found = [f"the chunks from partitions {list(old)} to {list(new)}"]
        what = "partition" if old == new == tuple(range(len(new))) else "chunk"
        for by_hand, planned in ((self.units, self.planned_units()), (self.shared, self.planned.shared)):
            for name, chunk in by_hand.items():
                if name not in planned:
                    found.append(f"{name} to {what} {chunk}")
                elif chunk != planned[name]:
                    found.append(f"{name} from {what} {planned[name]} to {chunk}")
        return tuple(found)

    def require_owner(self, name: str, used_in: Collection[int], was_used_in: Collection[int]) -> None:
        """Raises where a variable is stored with layers that do not use it, or the file no longer says with which.

        Args:
            name: name of the variable.
            used_in: the chunks whose layers use it.
            was_used_in: the chunks whose layers used it before any change by hand.
        """
        planned, here = self.planned.shared.get(name), sorted(used_in)
        if name not in self.shared:
            if planned is not None and len(here) > 1:
                raise PlacementError(
                    f"It does not say in 'shared' where {name!r} is stored, which layers of {self._in_words(here)} "
                    f"use. It was planned on {self._in_words([planned])}."
                )
            return
        # Unchanged, it may be with other layers, because an earlier step put it there. Or all of its layers were moved
        # together.
        stays = self.shared[name] == planned and (len(here) < 2 or planned not in was_used_in)
        if self.shared[name] not in here and not stays:
            use = f"Those of {self._in_words(here)} do" if here else "None does"
            raise PlacementError(
                f"It gives {name!r} to {self._in_words([self.shared[name]])}, whose layers do not use it. {use}."
            )

    def _in_words(self, chunks: Sequence[int]) -> str:
        """Returns the chunks, named by their partitions where each partition is one chunk."""
        what = "partition" if self.placement == tuple(range(len(self.placement))) else "chunk"
        return f"{what}{'s' * (len(chunks) > 1)} {' and '.join(map(str, chunks))}"


@dataclass(frozen=True)
class PlanFile:
    """All plans of a script.

    Args:
        partitions: number of partitions, the same in all of them.
        plans: one for each step that decided about variables, in order.
    """

    partitions: int
    plans: tuple[StoredPlan, ...]

    def to_json(self) -> str:
        """Returns the file's text, always in the same form, with one layer or variable per line."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PlanFile:
        """Reads a text of `to_json`, perhaps changed by hand.

        Args:
            text: the file's content.

        Returns:
            The plans.

        Raises:
            PlacementError: the text is not JSON or of another version; a field is missing, unknown, mistyped or there
                twice; two plans are of one step; a layer is on a partition that does not exist; or data would have to
                come back to an earlier chunk.
        """
        if len(text) > MAX_BYTES:
            raise PlacementError(f"It is larger than {MAX_BYTES} bytes, which no plan file is.")
        fields = parse(text)
        if isinstance(fields, Unreadable):
            raise PlacementError(f"It {fields.why}.")
        if not isinstance(fields, dict):
            raise PlacementError(f"It must hold a JSON object. It holds {in_words(fields)}.")
        version = fields.pop("version", None)
        if isinstance(version, Unreadable):
            raise PlacementError(f"'version' of the plan file {version.why}.")
        if type(version) is not int or version != VERSION:
            is_of = f"is of version {version}" if type(version) is int else f"says {in_words(version)} of its version"
            raise PlacementError(f"This release reads plan files of version {VERSION}. It {is_of}.")
        read: PlanFile = record_from(cls, fields, "the plan file")
        if not 1 <= read.partitions <= _MOST:
            raise PlacementError(
                f"'partitions' of the plan file must be at least 1, and at most {_MOST:,}. Received: {read.partitions}."
            )
        made_for: dict[tuple[str, str], int] = {}
        for number, plan in enumerate(read.plans, start=1):
            _require_order(plan, read.partitions)
            _require_settings(plan, f"of entry {number} of 'plans' of the plan file")
            first = made_for.setdefault((plan.step, plan.fingerprint), number)
            if first != number:
                raise PlacementError(
                    f"Entries {first} and {number} of 'plans' are both for step {plan.step!r}, with the same "
                    f"fingerprint. Leave one of them."
                )
        return read

    def plan_for(self, step: str, graph: OpGraph, units: Sequence[Unit], fingerprint: str) -> StoredPlan:
        """Returns the plan that was made for a step.

        Args:
            step: name of the step function.
            graph: its op graph.
            units: the units of the graph.
            fingerprint: hash of the graph.

        Returns:
            The plan with that fingerprint, or else one for the same layers and variables. Such a plan was made for
            batches of another size, for other constants, or under another name. Of several, it is the plan with the
            step's name.

        Raises:
            PlacementError: there is no such plan; the message says what differs from the plan most like it. Or the plan
                leaves a partition without a layer, or gives a variable to layers that do not use it.
        """
        same = [plan for plan in self.plans if plan.fingerprint == fingerprint]
        fitting = [plan for plan in same or self.plans if not _difference(plan, graph, units)]
        if fitting:
            found = next((plan for plan in fitting if plan.step == step), fitting[0])
            self._require_sense(found, graph, units)
            return found
        if same:
            raise PlacementError(f"It was changed, and no longer fits its model: {_difference(same[0], graph, units)}.")
        if not self.plans:
            raise PlacementError("It holds no plan.")
        here = {unit.name for unit in units}
        most_alike = max(self.plans, key=lambda plan: (plan.step == step, len(here.intersection(plan.units))))
        raise PlacementError(
            f"It was made for another model: {_difference(most_alike, graph, units)} (the plan of step "
            f"{most_alike.step!r} was looked at for step {step!r})."
        )

    def _require_sense(self, plan: StoredPlan, graph: OpGraph, units: Sequence[Unit]) -> None:
        """Raises where a fitting plan leaves a partition without a layer, or puts a variable with the wrong layers."""
        _require_planned(plan, self.partitions)
        before, planned = plan.planned_units(), plan.planned.placement
        # A step that uses a part of the models may have left some chunks empty.
        left = {*planned} - {planned[chunk] for chunk in before.values()}
        empty = {*range(self.partitions)} - {plan.placement[chunk] for chunk in plan.units.values()}
        empty -= left & {*plan.placement}
        if empty:
            raise PlacementError(
                f"It puts no layer on partition {min(empty)} of {self.partitions}. Every partition needs one."
            )
        used_in: dict[str, set[int]] = {name: set() for name in (*plan.shared, *plan.planned.shared)}
        was_used_in: dict[str, set[int]] = {name: set() for name in used_in}
        for unit in units:
            for name in {graph.variables[variable].name for variable in unit.variables} & used_in.keys():
                used_in[name].add(plan.units[unit.name])
                was_used_in[name].add(before[unit.name])
        for name, chunks in used_in.items():
            plan.require_owner(name, chunks, was_used_in[name])


def to_store(step: str, plan: Plan, graph: OpGraph) -> StoredPlan:
    """Returns what the file says of a plan.

    Args:
        step: name of the step function.
        plan: its plan, with its forecast.
        graph: its op graph.
    """
    shared = {shared.name: plan.owners[shared.name] for shared in plan.shared if shared.copies}
    firsts = {chunk: name for name, chunk in reversed(plan.units.items())}
    return StoredPlan(
        step=step,
        fingerprint=plan.fingerprint,
        microbatches=plan.microbatches,
        pipeline=plan.schedule,
        optimize=plan.objective,
        recompute=bool(plan.recompute),
        placement=plan.placement,
        units=plan.units,
        shared=shared,
        planned=Planned(plan.placement, tuple(firsts.get(chunk, "") for chunk in range(len(plan.placement))), shared),
        variables=_variables(graph),
        forecast=tuple(Held(row.parameters, row.stored_bytes, row.time_share) for row in plan.forecast),
    )


def _variables(graph: OpGraph) -> dict[str, str]:
    return {variable.name: type_in_words(variable.type) for variable in graph.variables if variable.in_model}


def _require_settings(plan: StoredPlan, of: str) -> None:
    """Raises where a plan was made for impossible settings, or names a variable that it does not have.

    Args:
        plan: the plan.
        of: the words for its place in the file.
    """
    if plan.microbatches < 1:
        raise PlacementError(f"'microbatches' {of} must be at least 1. Received: {plan.microbatches}.")
    if plan.optimize not in ("memory", "speed"):
        raise PlacementError(f"'optimize' {of} must be 'memory' or 'speed'. Received: {in_words(plan.optimize)}.")
    if not plan.pipeline:
        raise PlacementError(f"'pipeline' {of} must be a schedule. Received: {in_words(plan.pipeline)}.")
    for name in plan.shared:
        if name not in plan.variables:
            raise PlacementError(f"'shared' {of} names {name!r}, which is none of its 'variables'.")


def _require_planned(plan: StoredPlan, partitions: int) -> None:
    """Raises where a plan no longer says how it was planned."""
    placement, first, shared = plan.planned.placement, plan.planned.first, plan.planned.shared
    wrong = [f"the layer {name!r}, which the model has not" for name in first if name and name not in plan.units]
    wrong += [f"the variable {name!r}, which the model has not" for name in shared if name not in plan.variables]
    wrong += [f"partition {stage}, of {partitions}" for stage in placement if not 0 <= stage < partitions]
    wrong += [f"chunk {chunk}, of {len(placement)}" for chunk in shared.values() if not 0 <= chunk < len(placement)]
    if len(first) != len(placement) or not first:
        wrong.append(f"the first layers of {len(first)} chunks, of {len(placement)}")
    at = {name: position for position, name in enumerate(plan.units)}
    there = [name for name in first if name in at]
    wrong += [
        f"{name!r} as the first layer of a chunk after that of {before!r}, which it precedes"
        for before, name in pairwise(there)
        if at[name] <= at[before]
    ]
    if wrong:
        raise PlacementError(
            f"'planned' of the plan of step {plan.step!r} names {wrong[0]}. Leave it as it was written: by it is seen "
            f"what was moved."
        )


def _require_order(plan: StoredPlan, partitions: int) -> None:
    """Raises where a layer is in a chunk that does not exist, or before a layer that it gets data from."""
    chunks = len(plan.placement)
    if not plan.placement or not all(0 <= partition < partitions for partition in plan.placement):
        raise PlacementError(
            f"It has chunks on partitions {list(plan.placement)}, and there are {partitions}: 0 to {partitions - 1}."
        )
    what = "partition" if plan.placement == tuple(range(partitions)) else "chunk"
    for name, chunk in (*plan.units.items(), *plan.shared.items()):
        if not 0 <= chunk < chunks:
            raise PlacementError(f"It puts {name!r} on {what} {chunk}, and there are {chunks}: 0 to {chunks - 1}.")
    # The number of partitions may be another job's. That is checked where the file is used.
    if chunks > max(len(plan.units), partitions):
        raise PlacementError(f"It has {chunks} chunks, and {len(plan.units)} layers to put into them.")
    for (before, first), (name, second) in pairwise(plan.units.items()):
        if second < first:
            raise PlacementError(
                f"It puts {name!r} on {what} {second}, after {before!r} on {what} {first}. Data flows in the order of "
                f"the list, and cannot come back to an earlier {what}."
            )


def _difference(plan: StoredPlan, graph: OpGraph, units: Sequence[Unit]) -> str:
    """Returns the words for the first layer or variable in which a plan and a step differ; "" where there is none."""
    planned, here = list(plan.units), [unit.name for unit in units]
    known = {*here}
    others = [name for name in planned if name not in known]
    for name in here:
        if name not in plan.units:
            beside = f", and has {others[0]!r}, which the model has not" if others else ""
            return f"it does not know the layer {name!r}{beside}"
    if others:
        return f"it has the layer {others[0]!r}, which the model has not"
    position = {name: at for at, name in enumerate(planned)}
    for before, after in sorted(dependences(graph, [unit.nodes for unit in units]).edges):
        if position[here[before]] > position[here[after]]:
            return f"it has the layer {here[after]!r} before {here[before]!r}, whose data it needs in the model"
    variables = _variables(graph)
    for name, kind in variables.items():
        if name not in plan.variables:
            return f"it does not know the variable {name!r}"
        if plan.variables[name] != kind:
            return f"the variable {name!r} is {plan.variables[name]} in it, and {kind} in the model"
    for name in plan.variables:
        if name not in variables:
            return f"it has the variable {name!r}, which the model has not"
    return ""

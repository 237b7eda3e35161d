"""The file that keeps a script's plans, for people to read, to change and to run again.

A script decides where the variables of a model are at the first step that uses the model: there is one plan for each
such step, in the order in which they came.

    {
     "version": 3,
     "partitions": 2,
     "plans": [
      {
       "step": "train",                                 name of the step function
       "fingerprint": "5fe1...",                        hash of the step it was made for
       "microbatches": 4, "pipeline": "interleaved", "optimize": "memory",          what it was made for
       "placement": [0, 1],                             partition of every chunk
       "units": {"net/dense": 0, "net/dense_1": 1},     chunk of every layer, in the order in which data flows
       "shared": {"net/embedding/table": 0},            owner of each variable that layers of several chunks use
       "planned": {"first": ["net/dense", "net/dense_1"], "shared": {...}},      as it was before any change by hand
       "variables": {"net/dense/kernel": "float32[64,512]"},
       "forecast": [...]                                what each partition holds; only for the reader
      }
     ]
    }

`units` and `shared` say it all: every other variable is owned where the layer is that uses it. So a layer is moved by
changing one number; `planned` stays as it is, and a training says what was moved. Where a partition has one chunk,
chunk and partition are the same number.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.fingerprint import type_in_words
from smp_tf.partition.json_record import record_from
from smp_tf.partition.op_graph import OpGraph
from smp_tf.partition.plan import Plan
from smp_tf.partition.units import Unit, dependences

VERSION = 4


@dataclass(frozen=True, slots=True)
class Held:
    """What one partition is forecast to hold and to do; for the reader.

    Args:
        parameters: numbers in the variables it owns.
        bytes: of weights, gradients, slots, stash and what is in flight.
        time_share: its share of the compute time of all partitions, 0 to 1.
    """

    parameters: int
    bytes: int
    time_share: float


@dataclass(frozen=True, slots=True)
class Planned:
    """What the planner has decided, by which it is seen what was changed by hand.

    Args:
        first: the first layer of each chunk.
        shared: as `StoredPlan.shared`.
    """

    first: tuple[str, ...]
    shared: dict[str, int]


@dataclass(frozen=True)
class StoredPlan:
    """What the file says of one step; see the picture above."""

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

    def moved(self) -> dict[str, tuple[int, int]]:
        """The layers and shared variables that were moved by hand, with the chunk before, and the one they are in."""
        found, before = {}, 0
        for name, chunk in self.units.items():
            before = self.planned.first.index(name) if name in self.planned.first else before
            if chunk != before:
                found[name] = before, chunk
        for name, chunk in self.shared.items():
            if chunk != self.planned.shared.get(name, chunk):
                found[name] = self.planned.shared[name], chunk
        return found


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
        """The file's text: stable, one layer and one variable a line."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PlanFile:
        """Read what `to_json` gave, perhaps changed by hand.

        Args:
            text: the file's content.

        Returns:
            The plans.

        Raises:
            PlacementError: it is not JSON, of another version, a field is missing, unknown or mistyped, or layers are
                on partitions that do not exist or that data would have to come back to.
        """
        try:
            fields = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlacementError(f"It is not JSON, or not all of it is there: {error}.") from None
        if not isinstance(fields, dict):
            raise PlacementError(f"It must hold a JSON object. It holds a {type(fields).__name__}.")
        version = fields.pop("version", None)
        if version != VERSION:
            raise PlacementError(f"This release reads plan files of version {VERSION}. It is of version {version!r}.")
        read: PlanFile = record_from(cls, fields, "the plan file")
        for plan in read.plans:
            _require_order(plan, read.partitions)
        return read

    def plan_for(self, step: str, graph: OpGraph, units: Sequence[Unit], fingerprint: str) -> StoredPlan:
        """The plan that was made for a step.

        Args:
            step: name of the step function.
            graph: its op graph.
            units: the units of the graph.
            fingerprint: the graph's.

        Returns:
            The plan of that fingerprint, or else one for the same layers and variables: it was made for batches of
            another size, for other constants, or under another name.

        Raises:
            PlacementError: there is none; the message says what differs from the one that is most like it.
        """
        same = [plan for plan in self.plans if plan.fingerprint == fingerprint]
        if same:
            if differs := _difference(same[0], graph, units):
                raise PlacementError(f"It was changed, and no longer fits its model: {differs}.")
            return same[0]
        differences = [_difference(plan, graph, units) for plan in self.plans]
        fitting = [plan for plan, differs in zip(self.plans, differences, strict=True) if not differs]
        if fitting:
            return next((plan for plan in fitting if plan.step == step), fitting[0])
        if not self.plans:
            raise PlacementError("It holds no plan.")
        here = {unit.name for unit in units}
        most_alike = max(self.plans, key=lambda plan: (plan.step == step, len(here.intersection(plan.units))))
        raise PlacementError(
            f"It was made for another model: {_difference(most_alike, graph, units)} (the plan of step "
            f"{most_alike.step!r} was looked at for step {step!r})."
        )


def to_store(step: str, plan: Plan, graph: OpGraph) -> StoredPlan:
    """What the file is to say of a plan.

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
        planned=Planned(tuple(firsts[chunk] for chunk in range(len(plan.placement))), shared),
        variables=_variables(graph),
        forecast=tuple(Held(row.parameters, row.stored_bytes, row.time_share) for row in plan.forecast),
    )


def _variables(graph: OpGraph) -> dict[str, str]:
    return {variable.name: type_in_words(variable.type) for variable in graph.variables if variable.in_model}


def _require_order(plan: StoredPlan, partitions: int) -> None:
    """Raise where a layer is in a chunk that does not exist, or before what its data comes from."""
    chunks = len(plan.placement)
    if not plan.placement or not all(0 <= partition < partitions for partition in plan.placement):
        raise PlacementError(
            f"It has chunks on partitions {list(plan.placement)}, and there are {partitions}: 0 to {partitions - 1}."
        )
    what = "partition" if chunks == partitions else "chunk"
    for name, chunk in (*plan.units.items(), *plan.shared.items()):
        if not 0 <= chunk < chunks:
            raise PlacementError(f"It puts {name!r} on {what} {chunk}, and there are {chunks}: 0 to {chunks - 1}.")
    # As many as there are partitions may be those of another job, which is told where the file is used.
    if chunks > max(len(plan.units), partitions):
        raise PlacementError(f"It has {chunks} chunks, and {len(plan.units)} layers to put into them.")
    for (before, first), (name, second) in pairwise(plan.units.items()):
        if second < first:
            raise PlacementError(
                f"It puts {name!r} on {what} {second}, after {before!r} on {what} {first}. Data flows in the order of "
                f"the list, and cannot come back to an earlier {what}."
            )


def _difference(plan: StoredPlan, graph: OpGraph, units: Sequence[Unit]) -> str:
    """The first layer or variable in which a plan and a step differ, in words; "" where there is none."""
    planned, here = list(plan.units), [unit.name for unit in units]
    for name in here:
        if name not in plan.units:
            return f"it does not know the layer {name!r}"
    for name in planned:
        if name not in here:
            return f"it has the layer {name!r}, which the model has not"
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

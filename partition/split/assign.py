"""Gives every op of the step a chunk and a sweep, from the chunks of the model's units.

A microbatch passes the chunks in sweeps, up and down in turn. An op runs in the earliest sweep that its inputs allow:

    chunk      0     1     2     3
    sweep 0    F ──▶ F ──▶ F ──▶ F ─┐     forward
    sweep 1    B ◀── B ◀── B ◀── B ◀┘     backward
    sweep 2    └───▶ T ──▶ T ──▶ T        what still crosses chunks after that, such as a norm over all gradients

Within an even sweep data flows only to later chunks, and within an odd one only to earlier chunks. From one sweep to a
later one it may flow anywhere. A stage is what one rank runs: a chunk, or several of them. An op is one of:

- HOME: runs once per microbatch, on its chunk, in its sweep.
- FREE: without effect, cheap, and made only of what every rank has (arguments, constants, captured tensors, shapes). It
  is copied to wherever it is read, and never sent.
- WEIGHT: a cheap function of weights that no op of the step writes. It is made anew wherever it is read, and neither
  stashed nor sent. A stage without the chunk that owns the weight gets its value once per step.
- REPLICATED: writes a variable of the script's own (a metric), or follows from one. It runs once on every rank.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import ARGUMENT, CAPTURE, HANDLE_DTYPES, SEED, VARIABLE, Node, OpGraph
from smp_tf.partition.graph.op_kinds import FUNCTION_OPS, MATRIX_OPS, SUM_OVER_REPLICAS
from smp_tf.partition.units.units import weight_derived

#: Ops that are never copied to where they are read.
_DEAR_OPS = MATRIX_OPS | FUNCTION_OPS | {SUM_OVER_REPLICAS}


class Role(enum.Enum):
    """How an op is placed. The module's docstring says what each role means."""

    HOME = "home"
    FREE = "free"
    WEIGHT = "weight"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one op runs.

    Args:
        role: how it is placed.
        chunk: the chunk of the op; None for FREE and REPLICATED ops. A WEIGHT op has the owner's chunk, where it is
            made as an output.
        sweep: the sweep of the op; `Assignment.replicated_sweep` for REPLICATED ops, 0 where it has no meaning.
    """

    role: Role
    chunk: int | None
    sweep: int


@dataclass(frozen=True)
class Assignment:
    """Where every op of a graph runs.

    Args:
        graph: the graph.
        placement: the stage of every chunk.
        places: one `Place` for each node.
        sweeps: number of sweeps of the HOME ops.
        owners: the chunk of each variable of the model; None for a variable of the script's own.
    """

    graph: OpGraph
    placement: tuple[int, ...]
    places: tuple[Place, ...]
    sweeps: int
    owners: tuple[int | None, ...]

    @property
    def chunks(self) -> int:
        """Returns the number of chunks."""
        return len(self.placement)

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return 1 + max(self.placement)

    def stage_of(self, chunk: int | None) -> int | None:
        """Returns the stage of a chunk; None where there is no chunk, as for what all stages make."""
        return None if chunk is None else self.placement[chunk]

    def first_chunk(self, stage: int) -> int:
        """Returns the first of a stage's chunks."""
        return self.placement.index(stage)

    @property
    def replicated_sweep(self) -> int:
        """Returns the sweep of the REPLICATED ops. It comes after all others, and is never forward or backward."""
        return max(2, self.sweeps)


def assign(
    graph: OpGraph,
    chunks: int,
    chunk_of: Mapping[int, int],
    owners: Mapping[int, int] | None = None,
    placement: Sequence[int] | None = None,
) -> Assignment:
    """Places every op.

    Args:
        graph: a pruned op graph.
        chunks: number of chunks.
        chunk_of: chunk of every forward node that belongs to a unit of the model.
        owners: chunk of variables whose owner is already decided, by index. Others go to the chunk of their first use.
        placement: the stage of every chunk; None where each is a stage of its own.

    Returns:
        The assignment.

    Raises:
        PlacementError: an op of the model depends on a variable of the script that the step writes.
    """
    return _Assigner(graph, tuple(placement or range(chunks)), chunk_of, dict(owners or {})).run()


class _Assigner:
    def __init__(
        self, graph: OpGraph, placement: tuple[int, ...], chunk_of: Mapping[int, int], owners: dict[int, int]
    ) -> None:
        self.graph = graph
        self.placement = placement
        self.chunks = len(placement)
        self.chunk_of = chunk_of
        self.owners = owners
        self.places: list[Place] = []
        # The numbers of nodes with these roles, and of those that come after backward.
        self.free, self.replicated, self.after_backward = set[int](), set[int](), set[int]()
        #: The variables of the script that the step writes.
        self.states = {v.index for v in graph.variables if not v.in_model and not v.read_only}
        self.weight_derived = {number: of for number, of in weight_derived(graph).items() if of}

    def run(self) -> Assignment:
        self._decide_owners()
        first_user = self._first_users()
        for number, node in enumerate(self.graph.nodes):
            after = node.backward or not self.after_backward.isdisjoint(self.graph.data_from[number])
            place = self._place(number, node, after, first_user)
            self.places.append(place)
            if after:
                self.after_backward.add(number)
            if place.role is Role.FREE:
                self.free.add(number)
            elif place.role is Role.REPLICATED:
                self.replicated.add(number)
        sweeps = 1 + max((p.sweep for p in self.places if p.role is Role.HOME), default=0)
        places = tuple(Place(p.role, None, max(2, sweeps)) if p.role is Role.REPLICATED else p for p in self.places)
        owners = tuple(self.owners.get(v.index, 0) if v.in_model else None for v in self.graph.variables)
        return Assignment(self.graph, self.placement, places, sweeps, owners)

    def _decide_owners(self) -> None:
        for number, node in enumerate(self.graph.nodes):
            chunk = self.chunk_of.get(number)
            if chunk is None:
                continue
            for variable in node.writes + node.reads:
                if self.graph.variables[variable].in_model:
                    self.owners.setdefault(variable, chunk)

    def _first_users(self) -> dict[int, int]:
        """Returns the earliest chunk that depends on each op that belongs to no unit and has no placed input."""
        first: dict[int, int] = {}
        for number in range(len(self.graph.nodes) - 1, -1, -1):
            chunk = self.chunk_of.get(number, first.get(number))
            if chunk is None:
                continue
            for before in self.graph.data_from[number]:
                if before not in self.chunk_of:
                    first[before] = min(chunk, first.get(before, chunk))
        return first

    def _place(self, number: int, node: Node, after: bool, first_user: Mapping[int, int]) -> Place:
        if node.op in (ARGUMENT, CAPTURE, SEED, VARIABLE):
            return Place(Role.FREE, None, 0)
        before = self.graph.data_from[number]
        if not (self.replicated.isdisjoint(before) and self.states.isdisjoint(node.reads + node.writes)):
            if number in self.chunk_of:
                names = [self.graph.variables[v].name for v in node.reads + node.writes] or ["a script variable"]
                raise PlacementError(
                    f"Op {node.name!r} inside the model uses {names[0]!r}, a variable of the script that the step "
                    f"assigns. Such a variable lives on every rank, the model's ops on one. Make it a weight of the "
                    f"model (add_weight or an attribute set in the model's __init__). Of a layer of Keras's that keeps "
                    f"state, such as a recurrent one with stateful=True, leave the state out; what draws from a "
                    f"tf.random.Generator, such as RandomFlip, belongs in the data set."
                )
            return Place(Role.REPLICATED, None, 0)
        if number in self.weight_derived:
            return Place(Role.WEIGHT, self.owners.get(min(self.weight_derived[number]), 0), 0)
        if self.free.issuperset(before) and self._is_cheap(node):
            return Place(Role.FREE, None, 0)
        inputs = [self.places[n] for n in before]
        chunk = self._chunk(number, node, inputs, after, first_user)
        return Place(Role.HOME, chunk, self._sweep(node, chunk, inputs, after))

    def _is_cheap(self, node: Node) -> bool:
        if node.op in _DEAR_OPS or node.stateful or node.writes:
            return False
        read = [self.graph.variables[v] for v in node.reads]
        if read and (node.op != "ReadVariableOp" or any(v.in_model or not v.read_only for v in read)):
            return False
        return HANDLE_DTYPES.isdisjoint([kind.dtype for kind in node.outputs])

    def _chunk(self, number: int, node: Node, inputs: list[Place], after: bool, first_user: Mapping[int, int]) -> int:
        if number in self.chunk_of:
            return self.chunk_of[number]
        if node.backward and node.forward_of is not None:
            forward = self.places[node.forward_of]
            if forward.role is Role.HOME and forward.chunk is not None:
                return forward.chunk
        owned = [self.owners.get(v, 0) for v in node.writes + node.reads if self.graph.variables[v].in_model]
        if owned:
            return owned[0]
        placed = [(p.chunk, p.sweep) for p in inputs if p.role is Role.HOME and p.chunk is not None]
        if not placed:
            return min(first_user.get(number, self.chunks - 1), self.chunks - 1)
        if after and not node.backward:
            largest = self._largest_gradients(node)
            if largest:
                return min(largest)
        latest = max(sweep for _, sweep in placed)
        in_latest = [chunk for chunk, sweep in placed if sweep == latest]
        return min(in_latest) if latest % 2 else max(in_latest)

    def _largest_gradients(self, node: Node) -> list[int]:
        """Returns the stages of the largest inputs that follow from gradients, since scalars are sent to gradients."""
        found: dict[int, list[int]] = {}
        for tensor in node.inputs:
            place = self.places[tensor.node]
            if place.role is Role.HOME and place.chunk is not None and place.sweep > 0:
                found.setdefault(self.graph.type_of(tensor).nbytes(), []).append(place.chunk)
        return found[max(found)] if found else []

    def _sweep(self, node: Node, chunk: int, inputs: list[Place], after: bool) -> int:
        sweep = 1 if after else 0
        for place in inputs:
            if place.role is not Role.HOME or place.chunk is None or place.sweep < sweep:
                continue
            sweep = place.sweep
            flows = place.chunk >= chunk if sweep % 2 else place.chunk <= chunk
            if not flows:
                sweep += 1
        return sweep

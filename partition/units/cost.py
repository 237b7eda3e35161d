"""What the units of a step cost: time, weights, stash, and the tensors that flow between them.

Costs are static. `node_cost` counts the operations and bytes of every op. A roofline turns them into seconds: it takes
the larger of the time to compute and the time to move the data. Three kinds of records say what a cut costs; each names
the units concerned, so that any set of cuts can be costed from them:

    units        0 ──▶ 1 ──▶ 2 ──▶ 3
    Flow         made in 0, read in 1 and 3: sent once to each stage that reads it
    Stash        made in a forward pass, read by the backward of 1: kept on the stage of 1
    Weight       used in 0 and 3: stored on one stage, copied to the other
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from smp_tf.partition.graph.graph_facts import graph_fact
from smp_tf.partition.graph.op_graph import SOURCES, UNSENDABLE_DTYPES, OpGraph, Tensor
from smp_tf.partition.op_cost.function_cost import node_costs
from smp_tf.partition.op_cost.node_cost import NodeCost
from smp_tf.partition.op_cost.passed_through import passed_through
from smp_tf.partition.units.backward_parts import input_gradient_nodes
from smp_tf.partition.units.units import Unit, constants, copied, weight_derived

#: Ops that may lie between the contributions to a variable's gradient and their sum.
_SUMMING_OPS = frozenset({"AddN", "ConcatV2", "Identity"})


@dataclass(frozen=True, slots=True)
class MessageCost:
    """What a message between two processes of one host takes of a processor, at each of its ends.

    Args:
        seconds: for every message.
        seconds_per_byte: for every byte. It is more than zero.
    """

    seconds: float
    seconds_per_byte: float

    def of(self, nbytes: float) -> float:
        """Returns the seconds for a message of a size."""
        return self.seconds + nbytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds that turn operations and bytes into seconds.

    Args:
        flops: floating-point operations per second of one process.
        memory: bytes per second that one process reads or writes.
        link: bytes per second from one process to another.
        op_seconds: seconds to start one op.
        message: what a message takes of a processor, where that was measured; else None.
    """

    flops: float = 5e10
    memory: float = 8e9
    link: float = 4e9
    op_seconds: float = 4e-6
    message: MessageCost | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor that other units need.

    Args:
        producer: unit that makes it.
        consumers: other units that read it, ascending.
        nbytes: its size.
        backward: whether a backward op makes it.
        tensor: the tensor itself; None where nobody asks.
    """

    producer: int
    consumers: tuple[int, ...]
    nbytes: float
    backward: bool = False
    tensor: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Stash:
    """A forward tensor that backward ops read.

    Args:
        readers: units whose backward ops read it, ascending.
        nbytes: its size.
        producer: unit that makes it; None where nobody asks.
        tensor: the tensor itself; None where nobody asks.
    """

    readers: tuple[int, ...]
    nbytes: float
    producer: int | None = None
    tensor: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Weight:
    """A variable of the model.

    Args:
        variable: index of the variable in the graph.
        users: units that use it, ascending.
        value: bytes of the variable itself.
        gradient: bytes in which its gradient is accumulated; 0 where it has no gradient.
        slots: bytes of the optimizer's slots for it.
        is_gradient_on_host, are_slots_on_host: whether the gradient, or the slots, are in the host's memory instead of
            the device's.
    """

    variable: int
    users: tuple[int, ...]
    value: float
    gradient: float
    slots: float
    is_gradient_on_host: bool = False
    are_slots_on_host: bool = False

    @property
    def stored(self) -> float:
        """Returns the bytes on the device of the stage that owns the variable."""
        return self.copied + (0.0 if self.are_slots_on_host else self.slots)

    @property
    def crossing(self) -> float:
        """Returns the bytes that cross once per step between the owner and another stage: value, and gradient back."""
        return self.value + (self.gradient and self.value)

    @property
    def messages(self) -> int:
        """Returns how many messages cross once per step between the owner and another stage."""
        return 1 + (self.gradient > 0)

    @property
    def copied(self) -> float:
        """Returns the bytes on the device of another stage that uses the variable, for its value and its gradient."""
        return self.value + (0.0 if self.is_gradient_on_host else self.gradient)


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long a unit takes for one microbatch.

    Args:
        forward: the forward pass.
        backward: the backward pass.
        remade: the part of backward in which it makes again what forward had made.
    """

    forward: float = 0.0
    backward: float = 0.0
    remade: float = 0.0

    @property
    def both(self) -> float:
        """Both passes."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of a unit for one microbatch.

    Args:
        forward: those of the forward pass.
        input_gradient: those that the gradient of its inputs needs.
        weight_gradient: those that only gradients of weights need.
    """

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    @property
    def backward(self) -> float:
        """Those of the backward pass."""
        return self.input_gradient + self.weight_gradient


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a unit moves and stores, in bytes: of one microbatch where that says how much.

    Args:
        read, written: by all its ops, forward and backward.
        weights: values of the variables it uses.
        slots: the optimizer's slots for those variables.
        stash: forward tensors its backward ops read, without weights and constants.
    """

    read: float = 0.0
    written: float = 0.0
    weights: float = 0.0
    slots: float = 0.0
    stash: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitCost:
    """What one unit costs for one microbatch.

    Args:
        seconds: how long it takes.
        flops: its floating-point operations.
        nbytes: what it moves and stores.
        variables: the variables it uses; those with more users are counted in each.
    """

    seconds: Seconds = Seconds()
    flops: Flops = Flops()
    nbytes: Sizes = Sizes()
    variables: tuple[int, ...] = ()

    @property
    def weight_gradient_seconds(self) -> float:
        """Seconds of the backward pass that only gradients of weights need, by their share of its operations."""
        own = self.seconds.backward - self.seconds.remade
        return own * self.flops.weight_gradient / (self.flops.backward or 1.0)

    @property
    def input_gradient_seconds(self) -> float:
        """Seconds of the rest of the backward pass."""
        return self.seconds.backward - self.weight_gradient_seconds


@dataclass(frozen=True)
class Costs:
    """Costs of all units of a step.

    Args:
        units: one cost for each unit.
        flows: tensors that one unit makes and others read.
        stashes: tensors kept for backward.
        weights: variables of the model that units use.
        defaulted: op types that were counted as elementwise for want of a rule, and loops of
            assumed length.
        machine: speeds used.
        groups: for every unit, the group with which backward makes it again, or None; empty where all is kept.
        node_seconds: estimated seconds of every node.
        alone: the share of its time that a unit takes, forward and backward, while the other ranks of its host wait.
    """

    units: tuple[UnitCost, ...]
    flows: tuple[Flow, ...]
    stashes: tuple[Stash, ...]
    weights: tuple[Weight, ...]
    defaulted: tuple[str, ...] = ()
    machine: Machine = field(default_factory=Machine)
    groups: tuple[int | None, ...] = ()
    node_seconds: tuple[float, ...] = field(default=(), compare=False, repr=False)
    alone: tuple[float, float] = (1.0, 1.0)

    def on_host(self, *, gradients: bool, slots: bool) -> Costs:
        """Returns the costs with gradients or slots in the host's memory, where they take nothing of a device's.

        Args:
            gradients: whether gradients are accumulated in the host's memory.
            slots: whether the optimizer's slots are in the host's memory.
        """
        weights = (
            dataclasses.replace(weight, is_gradient_on_host=gradients, are_slots_on_host=slots)
            for weight in self.weights
        )
        return dataclasses.replace(self, weights=tuple(weights))


def estimate(
    graph: OpGraph,
    units: Sequence[Unit],
    *,
    slots: float | Mapping[int, float] = 0.0,
    microbatches: int = 1,
    machine: Machine | None = None,
    unknown: int = 1,
) -> Costs:
    """Estimates the cost of every unit from op types and shapes.

    Args:
        graph: one microbatch of the step.
        units: its units.
        slots: optimizer slots per trainable variable, in sizes of the variable (2 for Adam), as one number or by
            variable index.
        microbatches: microbatches a step. Their number bounds what a sparse gradient accumulates to.
        machine: speeds; the measured ones, if any.
        unknown: length assumed for dimensions that are only known when the step runs.

    Returns:
        Costs per unit, and what flows between units.

    Example:
        >>> costs = estimate(graph, build_units(graph), slots=2.0, microbatches=4)
    """
    machine = machine or Machine()
    forward_unit = {n: unit.index for unit in units for n in unit.nodes}
    backward_unit = {n: unit.index for unit in units for n in unit.backward}
    per_node = node_costs(graph, unknown)
    seconds = node_seconds(graph, machine, unknown)
    sums = _gradient_sums(graph)
    of_weights = {t for gradient in graph.gradients for t in gradient.tensors}
    returned = {t.node for t in graph.outputs if t not in of_weights}
    for_inputs = input_gradient_nodes(graph, backward_unit, sums, returned)
    flows, stashes = _tensors(graph, forward_unit, backward_unit, sums, unknown)
    weights = _weights(graph, units, slots, microbatches, unknown)
    weight_of = {w.variable: w for w in weights}
    stash_bytes = [0.0] * len(units)
    for stash in stashes:
        for reader in stash.readers:
            stash_bytes[reader] += stash.nbytes
    costs = tuple(
        UnitCost(
            Seconds(forward=sum([seconds[n] for n in unit.nodes]), backward=sum([seconds[n] for n in unit.backward])),
            Flops(
                forward=sum([per_node[n].flops for n in unit.nodes]),
                input_gradient=sum([per_node[n].flops for n in unit.backward if n in for_inputs]),
                weight_gradient=sum([per_node[n].flops for n in unit.backward if n not in for_inputs]),
            ),
            Sizes(
                read=sum([per_node[n].read for n in unit.nodes + unit.backward]),
                written=sum([per_node[n].written for n in unit.nodes + unit.backward]),
                weights=sum([weight_of[v].value for v in unit.variables]),
                slots=sum([weight_of[v].slots for v in unit.variables]),
                stash=stash_bytes[unit.index],
            ),
            unit.variables,
        )
        for unit in units
    )
    placed = forward_unit.keys() | backward_unit.keys()
    defaulted = sorted({name for number in placed for name in per_node[number].defaulted})
    return Costs(costs, flows, stashes, weights, tuple(defaulted), machine, node_seconds=seconds)


def node_seconds(graph: OpGraph, machine: Machine | None = None, unknown: int = 1) -> tuple[float, ...]:
    """Estimates how long every node of a graph takes each time it runs.

    Args:
        graph: the op graph.
        machine: speeds of the machine; None for the usual ones.
        unknown: length assumed for dimensions that are only known when the step runs.

    Returns:
        Seconds, by number of the node.
    """
    return _node_seconds(graph, machine or Machine(), unknown)


@graph_fact
def _node_seconds(graph: OpGraph, machine: Machine, unknown: int) -> tuple[float, ...]:
    return tuple([_seconds(cost, machine) for cost in node_costs(graph, unknown)])


def _seconds(cost: NodeCost, machine: Machine) -> float:
    if cost.flops == 0 and cost.moved == 0:
        return 0.0
    return max(cost.flops / machine.flops, cost.moved / machine.memory) + machine.op_seconds


def with_measured(
    costs: Costs,
    units: Sequence[Unit],
    measured: Mapping[str, tuple[float, float]],
    alone: tuple[float, float] = (1.0, 1.0),
) -> tuple[Costs, int]:
    """Returns the costs with measured times, where there are any.

    The times of the other units stay estimates, scaled to the measured ones.

    Args:
        costs: estimated costs.
        units: the units they belong to.
        measured: seconds forward and backward of units, by name; other names are ignored.
        alone: the share of these times that they take while the other ranks of the host wait.

    Returns:
        The costs, and how many of the units were measured.
    """
    known = {unit.index: measured[unit.name] for unit in units if unit.name in measured}
    estimated = sum(costs.units[u].seconds.both for u in known)
    scale = sum(map(sum, known.values())) / estimated if estimated else 1.0

    def timed(number: int, cost: UnitCost) -> UnitCost:
        forward, backward = known.get(number, (cost.seconds.forward * scale, cost.seconds.backward * scale))
        seconds = dataclasses.replace(cost.seconds, forward=forward, backward=backward)
        return dataclasses.replace(cost, seconds=seconds)

    if not known:
        return costs, 0
    timed_units = tuple(timed(n, cost) for n, cost in enumerate(costs.units))
    return dataclasses.replace(costs, units=timed_units, alone=alone), len(known)


def _tensors(
    graph: OpGraph,
    forward_unit: Mapping[int, int],
    backward_unit: Mapping[int, int],
    sums: frozenset[int],
    unknown: int,
) -> tuple[tuple[Flow, ...], tuple[Stash, ...]]:
    """Returns the tensors that flow between units, and those that are kept for backward."""
    remade, passed_by = constants(graph) | copied(graph) | weight_derived(graph).keys(), passed_through(graph)
    flows: list[Flow] = []
    stashes: list[Stash] = []
    for number, node in enumerate(graph.nodes):
        backward = number in backward_unit
        producer = backward_unit[number] if backward else forward_unit.get(number)
        if producer is None or node.op in SOURCES or number in remade:
            continue
        passed = passed_by.get(number, {})
        for index, kind in enumerate(node.outputs):
            nbytes = float(kind.nbytes(unknown))
            if index in passed and node.inputs[passed[index]].node in remade:
                # These are kernels that a recurrent layer's function gives to its gradient, that is the weights
                # themselves.
                continue
            if nbytes == 0:
                continue
            tensor = Tensor(number, index)
            readers = set(graph.consumers.get(tensor, ())) - sums
            ahead = {forward_unit[r] for r in readers if r in forward_unit}
            back = {backward_unit[r] for r in readers if r in backward_unit}
            others = (ahead | back) - {producer}
            # What a loop keeps for its gradient, a list of tensors, is never sent.
            if others and kind.dtype not in UNSENDABLE_DTYPES:
                flows.append(Flow(producer, tuple(sorted(others)), nbytes, backward, tensor))
            if back and not backward:
                stashes.append(Stash(tuple(sorted(back)), nbytes, producer, tensor))
    return tuple(flows), tuple(stashes)


def _gradient_sums(graph: OpGraph) -> frozenset[int]:
    """Returns the nodes that only put a variable's gradient together from what the variable's users give.

    Their inputs are accumulated, cross between stages once per step, and are costed with the weight.
    """
    sums: set[int] = set()
    stack = [t.node for gradient in graph.gradients for t in gradient.tensors]
    while stack:
        number = stack.pop()
        if number not in sums and graph.nodes[number].op in _SUMMING_OPS:
            sums.add(number)
            stack.extend(graph.data_from[number])
    return frozenset(sums)


def _weights(
    graph: OpGraph,
    units: Sequence[Unit],
    slots: float | Mapping[int, float],
    microbatches: int,
    unknown: int,
) -> tuple[Weight, ...]:
    """Returns the variables of the model that units use, with the bytes that they and their gradients take."""
    users: dict[int, list[int]] = {}
    for unit in units:
        for variable in unit.variables:
            users.setdefault(variable, []).append(unit.index)
    gradient_bytes: dict[int, float] = {}
    for gradient in graph.gradients:
        whole = float(graph.variables[gradient.variable].type.nbytes(unknown))
        given = sum(graph.type_of(t).nbytes(unknown) for t in gradient.tensors) * float(microbatches)
        # Slices of a sparse gradient add up over the microbatches, but never to more than the whole variable.
        gradient_bytes[gradient.variable] = whole if len(gradient.tensors) == 1 else min(whole, given)
    found = []
    for variable, used_by in sorted(users.items()):
        value = float(graph.variables[variable].type.nbytes(unknown))
        trained = variable in gradient_bytes
        many = slots.get(variable, 0.0) if isinstance(slots, Mapping) else slots
        found.append(
            Weight(
                variable=variable,
                users=tuple(used_by),
                value=value,
                gradient=gradient_bytes.get(variable, 0.0),
                slots=many * value if trained else 0.0,
            )
        )
    return tuple(found)

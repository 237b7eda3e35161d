"""The op graph: one microbatch of a training step as plain, immutable data.

Every pass takes an `OpGraph` and gives an `OpGraph`. Neither holds a `tf.Operation`. The graph holds the forward and
the backward ops of ONE microbatch, in an order that is topological:

    Argument ──┐                        (a microbatch slice of a step argument)
    Variable ──┼─▶ forward ops ─▶ loss ─▶ backward ops ─▶ gradients
    Capture ───┘        └────────── stash ──────▲

Four kinds of nodes stand for what flows in from outside. They are no ops of TensorFlow's: `ARGUMENT`, `CAPTURE` (a
tensor of the caller, the same on every rank), `VARIABLE` (the resource handle of a variable) and `SEED` (the
counter-based random key of this microbatch, int32[4]).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from smp_tf.partition.errors import GraphError
from smp_tf.partition.graph.graph_caches import graph_cache

ARGUMENT = "SmpArgument"
CAPTURE = "SmpCapture"
VARIABLE = "SmpVariable"
SEED = "SmpSeed"
SOURCES = frozenset({ARGUMENT, CAPTURE, VARIABLE, SEED})

#: Types whose tensors exist only inside one process. No cut may go through such a tensor.
UNSENDABLE_DTYPES = frozenset({"resource", "variant", "string"})
#: Those of them whose tensors no other process can make, either.
HANDLE_DTYPES = UNSENDABLE_DTYPES - {"string"}

_ITEM_BYTES = {"bool": 1, "half": 2, **dict.fromkeys(UNSENDABLE_DTYPES, 0)}


class Tensor(NamedTuple):
    """Output number `index` of node number `node`. It is a pair, since graphs look up tensors everywhere."""

    node: int
    index: int  # type: ignore[assignment]  # the method of a tuple is of no use here


@dataclass(frozen=True, slots=True)
class TensorType:
    """What is known of a tensor before the step runs.

    Args:
        dtype: TensorFlow's name of the type, such as "float32".
        shape: an int for each dimension, or None where it is unknown until the step runs; None when even the rank is
            unknown.
        entry: the type of an entry, for a variant that is a list of tensors. A loop keeps such lists for its gradient.
        entries: how many entries the list has in the end.
    """

    dtype: str
    shape: tuple[int | None, ...] | None
    entry: TensorType | None = None
    entries: int = 0

    @property
    def is_static(self) -> bool:
        """Returns whether every dimension is known."""
        return self.shape is not None and None not in self.shape

    def elements(self, unknown: int = 1) -> int:
        """Returns the number of elements, each unknown dimension counted as `unknown`."""
        return unknown if self.shape is None else _product(self.shape, unknown)

    def nbytes(self, unknown: int = 1, least: int = 0) -> int:
        """Returns the bytes of a tensor of this type, each unknown dimension counted as `unknown`.

        Args:
            unknown: length assumed for dimensions that are not known.
            least: smaller tensors count as 0 bytes.

        Returns:
            Bytes. Those of a list of tensors are those of its entries; handles and other variants have 0.
        """
        if self.entry is not None:
            return self.entries * self.entry.nbytes(unknown, least)
        count = item_bytes(self.dtype) * (unknown if self.shape is None else _product(self.shape, unknown))
        return count if count >= least else 0


@graph_cache(4096)
def _product(shape: tuple[int | None, ...], unknown: int) -> int:
    """Returns the product of a shape's dimensions. A step has few shapes, and asks for their sizes very often."""
    return math.prod([unknown if d is None else d for d in shape])


@functools.cache
def item_bytes(dtype: str) -> int:
    """Returns the bytes of one element of a type; 0 for a type that exists only inside one process.

    Args:
        dtype: TensorFlow's name of the type, such as "float8_e5m2" or "quint16". The number of bits is in the name.

    Returns:
        Bytes of an element in a tensor. An element of fewer than 8 bits takes one byte.

    Raises:
        GraphError: The name says no number of bits.
    """
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    if bits is None:
        raise GraphError(f"A type is named after its bits. Received: {dtype!r}.")
    return max(1, int(bits[0]) // 8)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one layer during the trace.

    Args:
        index: position in `OpGraph.calls`. Call 0 stands for "outside every model".
        path: names of the layers from the model inwards, such as "net/block_0/mlp"; "" for call 0.
        class_name: class of the layer, for reports.
        parent: index of the call in which this one was made; None for call 0.
        stage: the stage that the script asked for with a manual placement, or None.
    """

    index: int
    path: str
    class_name: str
    parent: int | None
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that the step touches.

    Args:
        index: position in `OpGraph.variables`.
        name: unique name for people and messages, such as "net/dense/kernel".
        type: dtype and shape of the value.
        trainable: whether gradients are wanted.
        in_model: True for a variable of a distributed model, which one stage stores; False for one of the script's own,
            such as a metric's, which lives on every rank.
        read_only: whether no op of the step writes it.
    """

    index: int
    name: str
    type: TensorType
    trainable: bool
    in_model: bool
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """One op of the step.

    Args:
        name: unique within the graph.
        op: TensorFlow op type, or one of `SOURCES`.
        inputs: data inputs, in order.
        control: nodes that must have run before.
        outputs: type of each output.
        definition: the serialised NodeDef (attributes; its inputs are not used), b"" for sources.
        call: the layer call in which the op was made; for a backward op, the call of the forward op it differentiates.
        backward: whether it was made while gradients were taken.
        forward_of: for a backward op, the forward node it differentiates, where known.
        stateful: whether it has an effect, or a result that differs from run to run.
        reads, writes: variables whose value the op (or a function it calls) may read or write.
        source: the number of the argument, capture or variable, for a node of kind ARGUMENT, CAPTURE or VARIABLE.
    """

    name: str
    op: str
    inputs: tuple[Tensor, ...]
    control: tuple[int, ...]
    outputs: tuple[TensorType, ...]
    definition: bytes = b""
    call: int = 0
    backward: bool = False
    forward_of: int | None = None
    stateful: bool = False
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Gradient:
    """The tensors that the step took as the gradient of a variable.

    Args:
        variable: index of the variable.
        tensors: one tensor (dense), or three: values, indices, dense shape (sparse slices).
    """

    variable: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class OpGraph:
    """One microbatch of a step: nodes in topological order, and what they touch.

    Args:
        nodes: all nodes; the position in this tuple is the node's number.
        calls: layer calls; `calls[0]` is "outside".
        variables: what the VARIABLE nodes stand for.
        outputs: the tensors the step returns, flattened.
        gradients: which of the graph's tensors are gradients of which variable.
        library: serialised FunctionDefLibrary with the functions that nodes call.
    """

    nodes: tuple[Node, ...]
    calls: tuple[Call, ...]
    variables: tuple[Variable, ...]
    outputs: tuple[Tensor, ...]
    gradients: tuple[Gradient, ...] = ()
    library: bytes = field(default=b"", repr=False)

    def type_of(self, tensor: Tensor) -> TensorType:
        """Returns the type of a tensor."""
        return self.nodes[tensor.node].outputs[tensor.index]

    def tensors_of(self, number: int) -> list[Tensor]:
        """Returns the outputs of a node."""
        return [Tensor(number, index) for index in range(len(self.nodes[number].outputs))]

    @cached_property
    def facts(self) -> dict[Hashable, Any]:
        """Returns what was found out about the graph so far, for `graph_facts.py`."""
        return {}

    @cached_property
    def data_from(self) -> tuple[tuple[int, ...], ...]:
        """Returns, for each node, the nodes that it takes data from, in the order of its inputs."""
        return tuple([tuple([tensor.node for tensor in node.inputs]) for node in self.nodes])

    @cached_property
    def data_to(self) -> tuple[tuple[int, ...], ...]:
        """Returns, for each node, the nodes that take data from it, in order, each once."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, before in enumerate(self.data_from):
            for each in dict.fromkeys(before):
                found[each].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def consumers(self) -> dict[Tensor, tuple[int, ...]]:
        """Returns the nodes that take each tensor as data input, in order, each once."""
        found: dict[Tensor, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for tensor in dict.fromkeys(node.inputs):
                found.setdefault(tensor, []).append(number)
        return {tensor: tuple(readers) for tensor, readers in found.items()}

    @cached_property
    def op_types(self) -> frozenset[str]:
        """Returns the types of its ops."""
        return frozenset({node.op for node in self.nodes})

    @cached_property
    def unsendable(self) -> frozenset[Tensor]:
        """Returns the tensors that exist only inside one process."""
        return frozenset(
            {
                Tensor(number, index)
                for number, node in enumerate(self.nodes)
                for index, kind in enumerate(node.outputs)
                if kind.dtype in UNSENDABLE_DTYPES
            }
        )

    @cached_property
    def number_of(self) -> dict[str, int]:
        """Returns each node's number by its name."""
        return {node.name: number for number, node in enumerate(self.nodes)}

    @cached_property
    def used_variables(self) -> frozenset[int]:
        """Returns the variables that an op reads or writes, or that have a gradient."""
        read = {variable for node in self.nodes for variable in node.reads}
        return self.written_variables | read | {gradient.variable for gradient in self.gradients}

    @cached_property
    def written_variables(self) -> frozenset[int]:
        """Returns the variables that an op writes."""
        return frozenset({variable for node in self.nodes for variable in node.writes})

    @cached_property
    def written_states(self) -> frozenset[int]:
        """Returns the variables of the script that an op writes."""
        return frozenset({variable for variable in self.written_variables if not self.variables[variable].in_model})

    def ancestors(self, targets: Iterable[int], *, control: bool = True) -> set[int]:
        """Returns the numbers of the given nodes and of every node they need.

        Args:
            targets: the nodes.
            control: whether control edges count, and not only data.
        """
        seen: set[int] = set()
        stack = list(targets)
        while stack:
            number = stack.pop()
            if number in seen:
                continue
            seen.add(number)
            stack.extend(self.data_from[number])
            if control:
                stack.extend(self.nodes[number].control)
        return seen

    def subgraph(self, keep: Iterable[int]) -> OpGraph:
        """Returns the same graph with only the given nodes, renumbered.

        Args:
            keep: numbers of the nodes to keep. Each must have its data inputs among them. Control edges from dropped
                nodes are dropped. So are gradients that lost a tensor; an output that lost one is an error.

        Returns:
            A new graph.

        Raises:
            GraphError: an input or an output of the step would be lost.
        """
        order = sorted(set(keep))
        new_number = {old: new for new, old in enumerate(order)}

        def moved(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
            try:
                return tuple([Tensor(new_number[tensor.node], tensor.index) for tensor in tensors])
            except KeyError as lost:
                name = self.nodes[lost.args[0]].name
                raise GraphError(f"Dropping node {name!r} would lose a tensor that is needed.") from None

        nodes = []
        for old in order:
            node = self.nodes[old]
            nodes.append(
                replace(
                    node,
                    inputs=moved(node.inputs),
                    control=tuple([new_number[c] for c in node.control if c in new_number]),
                    forward_of=new_number.get(node.forward_of) if node.forward_of is not None else None,
                )
            )
        gradients = tuple(
            Gradient(g.variable, moved(g.tensors))
            for g in self.gradients
            if all(t.node in new_number for t in g.tensors)
        )
        return replace(self, nodes=tuple(nodes), outputs=moved(self.outputs), gradients=gradients)

    def bare(self, keep: Collection[str] = ()) -> OpGraph:
        """Returns the same graph without what ops are made of: their definitions, and the functions that they call.

        Args:
            keep: types of ops that keep their definitions.
        """
        nodes = tuple(node if node.op in keep else replace(node, definition=b"") for node in self.nodes)
        return replace(self, nodes=nodes, library=b"")

    def validate(self) -> None:
        """Checks the rules that every pass relies on.

        Raises:
            GraphError: a name stands twice, an edge points forward or to nothing, or a reference is out of range.
        """
        if len(self.number_of) != len(self.nodes):
            names = [node.name for node in self.nodes]
            twice = next(name for name in names if names.count(name) > 1)
            raise GraphError(f"Two nodes have the name {twice!r}; names must be unique.")
        for number, node in enumerate(self.nodes):
            for tensor in node.inputs:
                if not 0 <= tensor.node < number:
                    raise GraphError(
                        f"Node {node.name!r} takes an input from node {tensor.node}, which is not before it."
                    )
                if not 0 <= tensor.index < len(self.nodes[tensor.node].outputs):
                    raise GraphError(
                        f"Node {node.name!r} takes output {tensor.index} of {self.nodes[tensor.node].name!r}, "
                        f"which has {len(self.nodes[tensor.node].outputs)}."
                    )
            for before in node.control:
                if not 0 <= before < number:
                    raise GraphError(f"Node {node.name!r} waits for node {before}, which is not before it.")
            if not 0 <= node.call < len(self.calls):
                raise GraphError(f"Node {node.name!r} names call {node.call}; there are {len(self.calls)}.")
            for variable in node.reads + node.writes:
                if not 0 <= variable < len(self.variables):
                    raise GraphError(f"Node {node.name!r} names variable {variable}; there are {len(self.variables)}.")
        for tensor in self.outputs + tuple(t for g in self.gradients for t in g.tensors):
            if not 0 <= tensor.node < len(self.nodes):
                raise GraphError(f"An output names node {tensor.node}; there are {len(self.nodes)}.")

    def lines(self) -> Iterator[str]:
        """Yields the graph as text, one node a line, for people and for diffs."""
        for number, node in enumerate(self.nodes):
            inputs = ", ".join(f"{t.node}:{t.index}" for t in node.inputs)
            waits = "".join(f" ^{c}" for c in node.control)
            types = ", ".join(f"{t.dtype}{list(t.shape) if t.shape is not None else '?'}" for t in node.outputs)
            marks = "".join(mark for mark, on in ((" backward", node.backward), (" stateful", node.stateful)) if on)
            yield f"{number} {node.op}({inputs}){waits} -> {types}  # {node.name} [{self.calls[node.call].path}]{marks}"

    def text(self) -> str:
        """Returns all of `lines` as one string."""
        return "\n".join(self.lines()) + "\n"

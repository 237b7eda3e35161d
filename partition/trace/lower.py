"""Turns TensorFlow's traced graph into the op graph: plain data, with every op's layer call, direction and effects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import tensorflow as tf

from smp_tf.partition import tf_internals
from smp_tf.partition.errors import TraceError
from smp_tf.partition.graph.op_graph import (
    ARGUMENT,
    CAPTURE,
    VARIABLE,
    Gradient,
    Node,
    OpGraph,
    Tensor,
    TensorType,
    Variable,
)
from smp_tf.partition.graph.tensor_types import static_shape, tensor_type
from smp_tf.partition.op_cost.loop_lists import with_list_lengths
from smp_tf.partition.op_cost.loop_turns import with_few_turns
from smp_tf.partition.trace.directions import Directions, directions_of
from smp_tf.partition.trace.trace import Trace

#: Ops registered as stateful although they have no effect that another op or a person could see.
_WITHOUT_EFFECT = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """An op graph, and the TensorFlow objects its source nodes stand for.

    Args:
        graph: the op graph.
        variables: the variable of each entry of `graph.variables`.
        captures: the outside tensor of each CAPTURE node, by its `source`.
        results: what the step function returned, each tensor replaced by its position in `graph.outputs`, wrapped
            in `OutputSlot`.
    """

    graph: OpGraph
    variables: tuple[tf.Variable, ...]
    captures: tuple[tf.Tensor, ...]
    results: Any


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSlot:
    """Stands for a tensor in a structure of results.

    Args:
        outputs: its positions in `OpGraph.outputs`. A composite tensor (sparse slices, ragged) has several.
        spec: type of a composite tensor, by which it is put together again; None for a plain one.
    """

    outputs: tuple[int, ...]
    spec: Any = None


def lower(trace: Trace, describe: Callable[[tf.Variable], tuple[str, bool]]) -> Lowered:
    """Turns a trace into an op graph.

    Args:
        trace: what `trace` gave.
        describe: returns a variable's unique name, and whether it belongs to a distributed model.

    Returns:
        The op graph, validated, with everything in it that the trace holds; nothing is pruned yet.
    """
    operations = trace.graph.get_operations()[: trace.length]
    numbers = _Numbers(operations, trace.definition)
    sources = _sources(trace, describe)
    ops = _Ops(operations, numbers, directions_of(trace, operations), sources.variable_of)
    nodes: list[Node] = []
    for number, op in enumerate(operations):
        source = sources.node(op, numbers)
        nodes.append(ops.node(number, nodes) if source is None else source)
    written = {v for node in nodes for v in node.writes}
    outputs, results = _results(trace, numbers)
    op_graph = OpGraph(
        nodes=tuple(nodes),
        calls=tuple(trace.recorder.calls),
        variables=tuple(dataclasses.replace(v, read_only=v.index not in written) for v in sources.variables),
        outputs=outputs,
        gradients=_gradients(trace, sources.objects, numbers),
        library=trace.definition.library.SerializeToString(deterministic=True),
    )
    op_graph = _in_topological_order(_with_late_inputs(op_graph))
    op_graph = with_few_turns(_with_paired_calls(op_graph))
    op_graph = with_list_lengths(op_graph)
    op_graph.validate()
    return Lowered(op_graph, tuple(sources.objects), tuple(sources.captures), results)


class _Numbers:
    """Numbers ops in the order in which they were made, and finds the edges of nodes.

    Args:
        operations: the ops.
        graph_def: holds the definitions of the ops.
    """

    def __init__(self, operations: Sequence[tf.Operation], graph_def: Any) -> None:
        self._number_of = {op.name: number for number, op in enumerate(operations)}
        #: The definition of each op, by the op's name.
        self.definition_of = {node.name: node for node in graph_def.node}

    def tensor(self, tensor: tf.Tensor) -> Tensor:
        """Returns the tensor of the op graph that stands for a tensor of TensorFlow's."""
        return Tensor(self._number_of[tensor.op.name], tensor.value_index)

    def edges(self, op: tf.Operation) -> _Edges:
        """Returns what a node of any kind says of its op.

        In a definition an input is "op", for the op's first output, "op:number" or "^op", for an op to wait for.
        """
        inputs, control = [], []
        for reference in self.definition_of[op.name].input:
            name, _, index = reference.partition(":")
            if not name.startswith("^"):
                inputs.append(Tensor(self._number_of[name], int(index or 0)))
            elif name[1:] in self._number_of:
                control.append(self._number_of[name[1:]])
        return _Edges(
            name=op.name,
            inputs=tuple(inputs),
            control=tuple(sorted(control)),
            outputs=tuple([tensor_type(tensor) for tensor in op.outputs]),
        )


class _Edges(TypedDict):
    """The arguments of `Node` that nodes of every kind have."""

    name: str
    inputs: tuple[Tensor, ...]
    control: tuple[int, ...]
    outputs: tuple[TensorType, ...]


@dataclasses.dataclass(frozen=True)
class _Sources:
    """What comes into a graph from outside.

    Args:
        variables: the variables of the graph's resource captures.
        objects: TensorFlow's objects for them.
        captures: the other outside tensors.
        argument_of: the argument of the step that an op stands for, by the op's name.
        variable_of: by an op's name, the variable whose handle it is.
        capture_of: the capture that an op stands for, by the op's name.
    """

    variables: Sequence[Variable]
    objects: Sequence[tf.Variable]
    captures: Sequence[tf.Tensor]
    argument_of: Mapping[str, int]
    variable_of: Mapping[str, int]
    capture_of: Mapping[str, int]

    def node(self, op: tf.Operation, numbers: _Numbers) -> Node | None:
        """Returns the node of an op that stands for something from outside; None for any other op."""
        for kind, table in ((ARGUMENT, self.argument_of), (VARIABLE, self.variable_of), (CAPTURE, self.capture_of)):
            if op.name in table:
                return Node(op=kind, source=table[op.name], **numbers.edges(op))
        return None


def _sources(trace: Trace, describe: Callable[[tf.Variable], tuple[str, bool]]) -> _Sources:
    """Returns what comes into a trace from outside."""
    variables, objects, variable_of_handle = _variables(trace.graph, describe)
    captures: list[tf.Tensor] = []
    variable_of: dict[str, int] = {}
    capture_of: dict[str, int] = {}
    for outside, inside in trace.graph.captures:
        handle = variable_of_handle.get(id(outside))
        if handle is not None:
            variable_of[inside.op.name] = handle
        else:
            capture_of[inside.op.name] = len(captures)
            captures.append(outside)
    argument_of = {tensor.op.name: index for index, tensor in enumerate(trace.arguments)}
    return _Sources(variables, objects, captures, argument_of, variable_of, capture_of)


class _Ops:
    """Makes the nodes of ops that compute.

    Args:
        operations: all ops.
        numbers: numbers and definitions of the ops.
        directions: the calls and directions in which the ops were made.
        variable_of: by an op's name, the variable whose handle it is.
    """

    def __init__(
        self,
        operations: Sequence[tf.Operation],
        numbers: _Numbers,
        directions: Directions,
        variable_of: Mapping[str, int],
    ) -> None:
        self._operations = operations
        self._numbers = numbers
        self._directions = directions
        self._variable_of = variable_of
        self._handles = {Tensor(number, 0) for number, op in enumerate(operations) if op.name in variable_of}
        self._stateful = {kind for kind in {op.type for op in operations} if tf_internals.is_stateful(kind)}

    def node(self, number: int, earlier: Sequence[Node]) -> Node:
        """Returns the node of an op.

        Args:
            number: number of the op.
            earlier: the nodes of all ops before it.
        """
        op, forward_of = self._operations[number], self._directions.forward_of[number]
        edges = self._numbers.edges(op)
        reads, writes = self._touched(op) if not self._handles.isdisjoint(edges["inputs"]) else ((), ())
        call, backward = self._directions.call_of[number], self._directions.is_backward[number]
        if backward:
            # The forward op may itself have been made while gradients were taken (recomputation).
            call = earlier[forward_of].call if forward_of is not None else 0
        made: dict[str, Any] = {"call": call, "backward": backward, "forward_of": forward_of}
        return Node(
            op=op.type,
            definition=self._numbers.definition_of[op.name].SerializeToString(deterministic=True),
            stateful=bool(writes) or (op.type in self._stateful and op.type not in _WITHOUT_EFFECT),
            reads=reads,
            writes=writes,
            **edges,
            **made,
        )

    def _touched(self, op: tf.Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the variables that an op reads and writes, through handles that are its inputs."""
        reads, writes = tf_internals.resource_uses(op)

        def indices(tensors: Sequence[tf.Tensor]) -> tuple[int, ...]:
            names = {tensor.op.name for tensor in tensors}
            return tuple(sorted({self._variable_of[name] for name in names if name in self._variable_of}))

        return indices(reads), indices(writes)


def _results(trace: Trace, numbers: _Numbers) -> tuple[tuple[Tensor, ...], Any]:
    """Returns the tensors that a step returned, and its results with slots in place of the tensors."""
    outputs: list[Tensor] = []

    def slot(value: Any) -> Any:
        composite = isinstance(value, tf.__internal__.CompositeTensor)
        if not composite and not isinstance(value, tf.Tensor):
            return value
        first = len(outputs)
        outputs.extend(numbers.tensor(part) for part in tf.nest.flatten(value, expand_composites=True))
        positions = tuple(range(first, len(outputs)))
        return OutputSlot(positions, tf.type_spec_from_value(value) if composite else None)

    results = tf.nest.map_structure(slot, trace.results)
    return tuple(outputs), results


def _gradients(trace: Trace, objects: Sequence[tf.Variable], numbers: _Numbers) -> tuple[Gradient, ...]:
    """Returns the gradients of variables that were taken in a trace."""
    by_handle = {id(v.handle): index for index, v in enumerate(objects)}
    return tuple(
        Gradient(by_handle[id(g.variable.handle)], tuple(numbers.tensor(t) for t in g.tensors))
        for g in trace.recorder.gradients
        if id(g.variable.handle) in by_handle and all(getattr(t, "graph", None) is trace.graph for t in g.tensors)
    )


def _with_late_inputs(graph: OpGraph) -> OpGraph:
    """Marks as forward ops of its call the nodes that a forward op got as inputs after it was made.

    Differentiating a while loop makes the stacks that the loop fills. It adds them to the loop's inputs.
    """
    changed = list(graph.nodes)
    for number, node in enumerate(graph.nodes):
        before = graph.data_from[number]
        if node.backward or max(before, default=number) <= number:
            continue
        stack = [late for late in before if late > number]
        while stack:
            late = stack.pop()
            if changed[late].backward:
                changed[late] = dataclasses.replace(changed[late], backward=False, forward_of=None, call=node.call)
                stack += [later for later in graph.data_from[late] if later > number]
    return dataclasses.replace(graph, nodes=tuple(changed)) if changed != list(graph.nodes) else graph


def _in_topological_order(graph: OpGraph) -> OpGraph:
    """Renumbers the graph so that every node comes after what it needs, and otherwise in the order of creation.

    An op may get inputs after it was made: differentiating a while loop adds to its inputs the stacks that it fills.
    They move to just before it, and all else stays where it is. A backward op comes after the op it differentiates even
    where it reads nothing of it. The zeros that a loop's backward pass begins with are such ops.
    """
    needs = _needed(graph)
    if all([before < number for number, needed in enumerate(needs) for before in needed]):
        return graph
    order: list[int] = []
    done, under_way = set[int](), set[int]()
    # A node is taken out when it is met again, after all that it needs.
    stack = list(range(len(graph.nodes) - 1, -1, -1))
    while stack:
        number = stack[-1]
        if number in done:
            stack.pop()
        elif number in under_way:
            order.append(stack.pop())
            done.add(number)
        else:
            under_way.add(number)
            missing = [before for before in sorted(needs[number], reverse=True) if before not in done]
            if any(before in under_way for before in missing):
                raise TraceError(
                    f"The step's graph has a cycle through op {graph.nodes[number].name!r}; such a graph cannot be cut."
                )
            stack.extend(missing)
    new = {old: position for position, old in enumerate(order)}

    def moved(tensor: Tensor) -> Tensor:
        return Tensor(new[tensor.node], tensor.index)

    nodes = tuple(
        dataclasses.replace(
            node,
            inputs=tuple(moved(t) for t in node.inputs),
            control=tuple(sorted(new[c] for c in node.control)),
            forward_of=None if node.forward_of is None else new[node.forward_of],
        )
        for node in (graph.nodes[old] for old in order)
    )
    return dataclasses.replace(
        graph,
        nodes=nodes,
        outputs=tuple(moved(t) for t in graph.outputs),
        gradients=tuple(Gradient(g.variable, tuple(moved(t) for t in g.tensors)) for g in graph.gradients),
    )


def _needed(graph: OpGraph) -> list[set[int]]:
    """Returns, for each node, the nodes that must come before it."""
    found = [{*before, *node.control} for node, before in zip(graph.nodes, graph.data_from, strict=True)]
    for node, needed in zip(graph.nodes, found, strict=True):
        if node.forward_of is not None:
            needed.add(node.forward_of)
    return found


def _variables(
    graph: Any, describe: Callable[[tf.Variable], tuple[str, bool]]
) -> tuple[list[Variable], list[tf.Variable], dict[int, int]]:
    """Returns the variables of the graph's resource captures, in the order in which the graph met them."""
    known = {id(v.handle): v for v in graph.variables}
    found: list[Variable] = []
    objects: list[tf.Variable] = []
    index_of: dict[int, int] = {}
    for outside, _ in graph.captures:
        variable = known.get(id(outside))
        if variable is None:
            continue
        name, in_model = describe(variable)
        index_of[id(outside)] = len(found)
        kind = TensorType(variable.dtype.name, static_shape(variable.shape))
        found.append(Variable(len(found), name, kind, bool(variable.trainable), in_model))
        objects.append(variable)
    return found, objects, index_of


def _with_paired_calls(graph: OpGraph) -> OpGraph:
    """Gives the layer call of a function's call to backward ops that were made around it.

    These ops were made outside any gradient function. A call (a fused LSTM, a nested tf.function) has outputs that only
    its own gradient reads, and `tf.gradients` fills in zeros for their gradients. The zeros read outputs of the call
    that no forward op reads:

        forward  PartitionedCall ──▶ y ──▶ ...
                      └──▶ kept ─────────────▶ backward ZerosLike ──▶ backward PartitionedCall
    """
    paired: dict[int, Node] = {}
    for number, node in enumerate(graph.nodes):
        if not node.backward or node.forward_of is not None:
            continue
        for tensor in node.inputs:
            producer = graph.nodes[tensor.node]
            if "Call" not in producer.op or producer.backward:
                continue
            if all(graph.nodes[reader].backward for reader in graph.consumers[tensor]):
                paired[number] = dataclasses.replace(node, forward_of=tensor.node, call=producer.call)
                break
    if not paired:
        return graph
    nodes = tuple([paired.get(number, node) for number, node in enumerate(graph.nodes)])
    return dataclasses.replace(graph, nodes=nodes)

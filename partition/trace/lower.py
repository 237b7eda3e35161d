"""From TensorFlow's traced graph to the op graph: plain data, with every op's layer call, direction and effects."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

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
from smp_tf.partition.trace.trace import GradientFunctionSpan, Trace

#: Stateful by registration, yet without any effect that another op or a person could see.
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
        outputs: its position in `OpGraph.outputs`; a composite tensor (sparse slices, ragged) has several.
        spec: type of a composite tensor, from which it is put together again; None for a plain one.
    """

    outputs: tuple[int, ...]
    spec: Any = None


def _paint(spans: Sequence[Any], length: int, value: Callable[[int], Any], initial: Any) -> list[Any]:
    """Returns for each op number the value of the innermost span around it (spans come outermost first)."""
    found = [initial] * length
    for index, span in enumerate(spans):
        if span.end > span.start:
            found[span.start : span.end] = [value(index)] * (span.end - span.start)
    return found


def lower(trace: Trace, describe: Callable[[tf.Variable], tuple[str, bool]]) -> Lowered:
    """Turns a trace into an op graph.

    Args:
        trace: what `trace` gave.
        describe: for a variable, its unique name and whether it belongs to a distributed model.

    Returns:
        The op graph, validated, with everything in it that the trace holds; nothing is pruned yet.
    """
    graph, recorder = trace.graph, trace.recorder
    operations = graph.get_operations()[: trace.length]
    number_of = {op.name: number for number, op in enumerate(operations)}
    length = len(operations)
    call_of = _paint(recorder.call_spans, length, lambda i: recorder.call_spans[i].call, 0)
    is_backward = _paint(recorder.backward_spans, length, lambda i: True, False)
    # Gradient functions are noted when they end: inner ones (a tape inside a custom gradient) first.
    function_spans = sorted(recorder.function_spans, key=lambda span: (span.start, -span.end))
    function_of = _paint(function_spans, length, lambda i: i, None)
    forward_op = _ForwardOps(operations, call_of, is_backward)
    differentiated = [forward_op.find(span) for span in function_spans]

    variables, variable_objects, variable_of_handle = _variables(graph, describe)
    argument_of = {tensor.op.name: index for index, tensor in enumerate(trace.arguments)}
    captures: list[tf.Tensor] = []
    variable_of: dict[str, int] = {}
    capture_of: dict[str, int] = {}
    for outside, inside in graph.captures:
        handle = variable_of_handle.get(id(outside))
        if handle is not None:
            variable_of[inside.op.name] = handle
        else:
            capture_of[inside.op.name] = len(captures)
            captures.append(outside)

    graph_def = graph.as_graph_def()
    definition_of = {node.name: node for node in graph_def.node}
    nodes: list[Node] = []
    for number, op in enumerate(operations):
        inputs = tuple(Tensor(number_of[t.op.name], t.value_index) for t in op.inputs)
        control = tuple(sorted(number_of[c.name] for c in op.control_inputs if c.name in number_of))
        outputs = tuple(tensor_type(t) for t in op.outputs)
        common: dict[str, Any] = {"name": op.name, "inputs": inputs, "control": control, "outputs": outputs}
        for kind, table in ((ARGUMENT, argument_of), (VARIABLE, variable_of), (CAPTURE, capture_of)):
            if op.name in table:
                nodes.append(Node(op=kind, source=table[op.name], **common))
                break
        else:
            forward_of = differentiated[function_of[number]] if function_of[number] is not None else None
            backward = is_backward[number]
            reads, writes = _touched(op, number_of, variable_of)
            call = call_of[number]
            if backward:
                # The forward op may itself have been made while gradients were taken (recomputation).
                call = nodes[forward_of].call if forward_of is not None else 0
            nodes.append(
                Node(
                    op=op.type,
                    definition=definition_of[op.name].SerializeToString(deterministic=True),
                    call=call,
                    backward=backward,
                    forward_of=forward_of,
                    stateful=_has_effect(op, reads, writes),
                    reads=reads,
                    writes=writes,
                    **common,
                )
            )
    written = {v for node in nodes for v in node.writes}
    variables = [dataclasses.replace(v, read_only=v.index not in written) for v in variables]

    outputs_flat: list[Tensor] = []

    def slot(value: Any) -> Any:
        composite = isinstance(value, tf.__internal__.CompositeTensor)
        if not composite and not isinstance(value, tf.Tensor):
            return value
        first = len(outputs_flat)
        for part in tf.nest.flatten(value, expand_composites=True):
            outputs_flat.append(Tensor(number_of[part.op.name], part.value_index))
        positions = tuple(range(first, len(outputs_flat)))
        return OutputSlot(positions, tf.type_spec_from_value(value) if composite else None)

    results = tf.nest.map_structure(slot, trace.results)
    by_handle = {id(v.handle): index for index, v in enumerate(variable_objects)}
    gradients = tuple(
        Gradient(
            by_handle[id(g.variable.handle)], tuple(Tensor(number_of[t.op.name], t.value_index) for t in g.tensors)
        )
        for g in recorder.gradients
        if id(g.variable.handle) in by_handle and all(getattr(t, "graph", None) is graph for t in g.tensors)
    )
    op_graph = _in_topological_order(
        OpGraph(
            nodes=_with_late_inputs(nodes),
            calls=tuple(recorder.calls),
            variables=tuple(variables),
            outputs=tuple(outputs_flat),
            gradients=gradients,
            library=graph_def.library.SerializeToString(deterministic=True),
        )
    )
    op_graph = with_few_turns(dataclasses.replace(op_graph, nodes=_pair_function_calls(op_graph.nodes)))
    op_graph = with_list_lengths(op_graph)
    op_graph.validate()
    return Lowered(op_graph, tuple(variable_objects), tuple(captures), results)


def _with_late_inputs(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Marks nodes that a forward op got as inputs after it was made as forward ops of its call.

    Differentiating a while loop makes the stacks that the loop fills, and adds them to the loop's inputs.
    """
    changed = list(nodes)
    for number, node in enumerate(nodes):
        if node.backward:
            continue
        stack = [t.node for t in node.inputs if t.node > number]
        while stack:
            late = stack.pop()
            if changed[late].backward:
                changed[late] = dataclasses.replace(changed[late], backward=False, forward_of=None, call=node.call)
                stack.extend(t.node for t in changed[late].inputs if t.node > number)
    return tuple(changed)


def _in_topological_order(graph: OpGraph) -> OpGraph:
    """Returns the graph renumbered so that every node comes after what it needs, otherwise in the order of creation.

    An op may get inputs after it was made: differentiating a while loop adds the stacks it fills to its inputs. They
    move to just before it, and all else stays where it is. A backward op comes after the op it differentiates also
    where it reads nothing of it, such as the zeros that a loop's backward pass begins with.
    """
    needs = [sorted(_needed(node), reverse=True) for node in graph.nodes]
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
            missing = [before for before in needs[number] if before not in done]
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


def _needed(node: Node) -> set[int]:
    """Returns the nodes that a node has to come after."""
    differentiated = set() if node.forward_of is None else {node.forward_of}
    return {t.node for t in node.inputs} | set(node.control) | differentiated


class _ForwardOps:
    """Finds the forward op that a gradient function was called for."""

    def __init__(self, operations: Sequence[tf.Operation], call_of: Sequence[int], is_backward: Sequence[bool]) -> None:
        self._number = {op.name: number for number, op in enumerate(operations)}
        self._graph = operations[0].graph if operations else None
        self._in_scope: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, op in enumerate(operations):
            if not is_backward[number]:
                # A scope that was opened for one op only gives the op its own name.
                for scope in (op.name.rpartition("/")[0], op.name):
                    self._in_scope[scope, op.type].append(number)

    def find(self, span: GradientFunctionSpan) -> int | None:
        """Returns the number of the forward op, or None where nothing tells.

        An output of the op says it exactly. Where the gradient function needs no outputs, the op is the one that
        reads all inputs still known; where it needs no inputs either, the only op of that type in the name scope.
        """
        for tensor in span.outputs:
            if self._here(tensor):
                return self._number[tensor.op.name]
        candidates: list[int] | None = None
        for position, tensor in enumerate(span.inputs):
            if not self._here(tensor):
                continue
            readers = [
                self._number[op.name]
                for op in tensor.consumers()
                if op.type == span.op_type and position < len(op.inputs) and op.inputs[position] is tensor
            ]
            candidates = readers if candidates is None else [n for n in candidates if n in readers]
        candidates = [n for n in candidates or () if n < span.start]
        in_scope = [n for n in self._in_scope.get((span.scope, span.op_type), ()) if n < span.start]
        both = [n for n in candidates if n in in_scope]
        for choice in (both, candidates, in_scope):
            if len(choice) == 1:
                return choice[0]
        return None

    def _here(self, tensor: Any) -> bool:
        return getattr(tensor, "graph", None) is not None and tensor.graph is self._graph


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


def _touched(
    op: tf.Operation, number_of: dict[str, int], variable_of: dict[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the variables an op reads and writes, through handles that are its inputs."""
    if not any(t.dtype == tf.resource for t in op.inputs):
        return (), ()
    reads, writes = tf_internals.resource_uses(op)

    def indices(tensors: Sequence[tf.Tensor]) -> tuple[int, ...]:
        return tuple(sorted({variable_of[t.op.name] for t in tensors if t.op.name in variable_of}))

    return indices(reads), indices(writes)


def _has_effect(op: tf.Operation, reads: tuple[int, ...], writes: tuple[int, ...]) -> bool:
    if writes:
        return True
    return op.type not in _WITHOUT_EFFECT and tf_internals.is_stateful(op.type)


def _pair_function_calls(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Gives backward ops that were made around a call of a function the layer call of that call.

    They were made outside any gradient function: `tf.gradients` fills in zeros for what a call (a fused LSTM, a nested
    tf.function) returns to nobody but its own gradient. They read outputs of the call that no forward op reads:

        forward  PartitionedCall ──▶ y ──▶ ...
                      └──▶ kept ─────────────▶ backward ZerosLike ──▶ backward PartitionedCall
    """
    readers: dict[Tensor, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        for tensor in node.inputs:
            readers[tensor].append(number)
    paired = list(nodes)
    for number, node in enumerate(nodes):
        if not node.backward or node.forward_of is not None:
            continue
        for tensor in node.inputs:
            producer = nodes[tensor.node]
            if producer.backward or producer.op in (ARGUMENT, VARIABLE, CAPTURE, "Const"):
                continue
            if all(nodes[reader].backward for reader in readers[tensor]) and "Call" in producer.op:
                paired[number] = dataclasses.replace(node, forward_of=tensor.node, call=producer.call)
                break
    return tuple(paired)

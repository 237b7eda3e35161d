"""Costs of all nodes of a graph, also of those that call functions.

A function's body has no shapes of its own. The call says the shapes of the arguments, and simple rules carry them
through the body: one for products, one for elementwise ops; all other shapes are unknown. Where a loop's condition
compares with a constant, the body counts as often as the condition says. The gradient of a loop counts as often as the
loop. Every other loop counts `ASSUMED_TRIPS` times, and this is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smp_tf.partition.graph.graph_facts import graph_fact
from smp_tf.partition.graph.node_def import MAX_DEPTH, attributes, bodies, functions, in_order
from smp_tf.partition.graph.op_graph import VARIABLE, Node, OpGraph, Tensor, TensorType
from smp_tf.partition.graph.op_kinds import CALL_OPS, FREE_OPS, FUNCTION_OPS, LOOP_OPS, PER_OUTPUT
from smp_tf.partition.op_cost.node_cost import FREE, NodeCost, op_cost

#: How often the body of a loop is assumed to run when nothing says how often.
ASSUMED_TRIPS = 16
_INTEGERS = {3: np.int32, 9: np.int64}

#: A known integer, or vector of integers.
_Known = tuple[int, ...] | int | None


def node_costs(graph: OpGraph, unknown: int = 1) -> tuple[NodeCost, ...]:
    """Returns the cost of every node of a graph.

    Args:
        graph: the graph, with the library of the functions it calls.
        unknown: length assumed for dimensions that are not known.

    Returns:
        One cost for each node.
    """
    costs, _ = _walk(graph, unknown)
    return costs


def loop_trips(graph: OpGraph) -> dict[int, int]:
    """Returns how often the loops of a graph run, also those in functions that its nodes call.

    Args:
        graph: the graph, with the library of the functions it calls.

    Returns:
        Turns by number of the node; the most where a node has several loops. A loop that nothing is known of has no
        entry.
    """
    _, trips = _walk(graph, 1)
    return {number: max(known) for number, known in trips.items() if known}


@graph_fact
def _walk(graph: OpGraph, unknown: int) -> tuple[tuple[NodeCost, ...], dict[int, list[int]]]:
    """Returns the cost of every node, and how often the loops in those that call functions run."""
    library = functions(graph.library)
    costs: list[NodeCost] = []
    values: dict[Tensor, _Known] = {}
    trips: dict[int, list[int]] = {}
    seen: list[Sequence[TensorType]] = []
    for number, node in enumerate(graph.nodes):
        inputs = [seen[t.node][t.index] for t in node.inputs]
        seen.append(_as_seen(graph, node) if node.op == VARIABLE else node.outputs)
        given = list(map(values.get, node.inputs))
        if node.op in FUNCTION_OPS and node.definition:
            of_forward = trips.get(node.forward_of, []) if node.forward_of is not None else []
            call = _Caller(library, unknown, max(of_forward, default=None))
            costs.append(call.cost(node.op, attributes(node), inputs, given))
            trips[number] = call.trips
            continue
        if node.op in ("Const", "StridedSlice", "Identity") and node.definition:
            values[Tensor(number, 0)] = _folded(node.op, attributes(node), given)
        costs.append(op_cost(node, inputs, node.outputs, unknown))
    return tuple(costs), trips


def _as_seen(graph: OpGraph, node: Node) -> Sequence[TensorType]:
    """Returns the type of a variable's handle with the shape of the variable, as it counts for the handle's users."""
    if node.source is None:
        return node.outputs
    shape = graph.variables[node.source].type.shape
    return [TensorType(kind.dtype, shape) for kind in node.outputs]


def _folded(op: str, attrs: Any, inputs: Sequence[_Known]) -> _Known:
    """Returns the value of an integer constant, or of one entry taken out of a constant vector."""
    if op == "Const":
        tensor = attrs["value"].tensor
        if tensor.dtype not in _INTEGERS or len(tensor.tensor_shape.dim) > 1:
            return None
        dims = [dim.size for dim in tensor.tensor_shape.dim]
        listed: Sequence[int] = tensor.int_val if tensor.dtype == 3 else tensor.int64_val
        if tensor.tensor_content:
            listed = np.frombuffer(tensor.tensor_content, _INTEGERS[tensor.dtype]).tolist()
        if not dims:
            return int(listed[0]) if listed else 0
        # Equal entries at the end of a tensor may be written once.
        filled = [*listed, *[listed[-1] if listed else 0] * (dims[0] - len(listed))]
        return tuple(int(v) for v in filled)
    if op == "StridedSlice":
        vector, begin = (inputs[0], inputs[1]) if len(inputs) > 1 else (None, None)
        if isinstance(vector, tuple) and isinstance(begin, tuple) and len(begin) == 1:
            at = begin[0]
            if attrs["shrink_axis_mask"].i == 1 and -len(vector) <= at < len(vector):
                return vector[at]
        return None
    return inputs[0] if inputs else None


@dataclass
class _Caller:
    """Costs one call, with the calls inside it.

    Args:
        library: the functions.
        unknown: length assumed for dimensions that are not known.
        assumed: how often a loop runs that nothing is known of; None for `ASSUMED_TRIPS`.
        trips: how often the loops that were met so far run, where this is known.
    """

    library: dict[str, Any]
    unknown: int
    assumed: int | None
    trips: list[int] = field(default_factory=list)

    def cost(
        self,
        op: str,
        attrs: Any,
        inputs: Sequence[TensorType],
        given: Sequence[_Known],
        depth: int = 0,
    ) -> NodeCost:
        """Returns the cost of the body, of the body as often as the loop runs, or of the dearest branch."""
        if depth > MAX_DEPTH:
            return NodeCost(0.0, 0.0, 0.0, frozenset({f"{op} (nested too deeply)"}))
        if op in LOOP_OPS:
            # A value that the loop changes is not known in its body.
            once = self._body(op, bodies(attrs)[0], inputs, [None] * len(inputs), depth)
            trips = _trips(self.library.get(attrs["cond"].func.name), given) or self.assumed
            if trips is None:
                said = frozenset({f"{op} (taken to run {ASSUMED_TRIPS} times)"})
                return (once + NodeCost(0.0, 0.0, 0.0, said)).times(ASSUMED_TRIPS)
            self.trips.append(trips)
            return once.times(trips)
        if op in CALL_OPS:
            return self._body(op, bodies(attrs)[0], inputs, given, depth)
        costs = [self._body(op, name, inputs[1:], given[1:], depth) for name in bodies(attrs)]
        return max(costs, key=lambda c: (c.flops, c.moved), default=FREE)

    def _body(
        self,
        op: str,
        name: str,
        inputs: Sequence[TensorType],
        given: Sequence[_Known],
        depth: int,
    ) -> NodeCost:
        """Returns the sum over the ops of a function, with the shapes that follow from its arguments."""
        function = self.library.get(name)
        if function is None:
            return NodeCost(0.0, 0.0, 0.0, frozenset({f"{op} (function {name!r} not in the graph)"}))
        names = [arg.name for arg in function.signature.input_arg]
        known = dict(zip(names, inputs, strict=False))
        values = dict(zip(names, given, strict=False))
        matrices = [t.shape for t in inputs if t.dtype != "resource" and t.shape is not None]
        rows = next((s[0] for s in matrices if len(s) == 2 and s[0]), None) or self.unknown
        total = FREE
        for node_def in in_order(function):
            # A reference is "argument" or "node:output:index"; only first outputs are known.
            read = [r if r in known else r.partition(":")[0] for r in node_def.input if r[0] != "^"]
            types = [known.get(r, TensorType("float32", None)) for r in read]
            passed = [values.get(r) for r in read]
            if node_def.op in FUNCTION_OPS:
                total += self.cost(node_def.op, node_def.attr, types, passed, depth + 1)
                continue
            values[node_def.name] = (
                _folded(node_def.op, node_def.attr, passed)
                if node_def.op in ("Const", "StridedSlice", "Identity")
                else None
            )
            output = _output_type(node_def, types, rows)
            known[node_def.name] = output
            if node_def.op not in FREE_OPS:
                serialised = node_def.SerializeToString()
                node = Node(node_def.name, node_def.op, (), (), (output,), serialised)
                total += op_cost(node, types, (output,), self.unknown)
        return total


def _trips(condition: Any, given: Sequence[_Known]) -> int | None:
    """Returns how often a loop runs: the smallest bound that its condition compares a counter with."""
    if condition is None:
        return None
    names = [arg.name for arg in condition.signature.input_arg]
    values: dict[str, _Known] = dict(zip(names, given, strict=False))
    bounds = []
    for node in in_order(condition):
        read = [values.get(r if r in values else r.partition(":")[0]) for r in node.input]
        if node.op in ("Const", "StridedSlice", "Identity"):
            values[node.name] = _folded(node.op, node.attr, read)
        elif node.op in ("Less", "LessEqual") and len(read) >= 2 and isinstance(read[1], int):
            start = read[0] if isinstance(read[0], int) else 0
            bounds.append(read[1] - start + (node.op == "LessEqual"))
    return max(min(bounds), 0) if bounds else None


def _output_type(node_def: Any, inputs: Sequence[TensorType], rows: int) -> TensorType:
    """Returns the type of the first output of an op inside a body, as far as simple rules tell."""
    dtype = next((t.dtype for t in inputs if t.dtype not in ("resource", "variant")), "float32")
    op, shapes = node_def.op, [t.shape for t in inputs]
    if op == "Const":
        dims = node_def.attr["value"].tensor.tensor_shape.dim
        return TensorType(dtype, tuple(dim.size for dim in dims))
    if op == "MatMul" and len(shapes) == 2:
        left, right = shapes
        first, last = node_def.attr["transpose_a"].b, not node_def.attr["transpose_b"].b
        tall = left[int(first)] if left and len(left) == 2 else rows
        wide = right[int(last)] if right and len(right) == 2 else None
        return TensorType(dtype, (tall, wide))
    if op == "Split" and len(shapes) == 2 and shapes[1] and shapes[1][-1]:
        parts = max(node_def.attr["num_split"].i, 1)
        return TensorType(dtype, (*shapes[1][:-1], shapes[1][-1] // parts))
    if op == "ReadVariableOp" and shapes:
        return TensorType("float32", shapes[0])
    if op in PER_OUTPUT or op in ("Identity", "Cast", "ZerosLike", "OnesLike", "AddN"):
        ranked = [s for s in shapes if s is not None]
        largest = max(ranked, key=lambda s: (len(s), math.prod(d or 1 for d in s)), default=None)
        return TensorType(dtype, largest)
    return TensorType(dtype, None)

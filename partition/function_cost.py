"""Costs of all nodes of a graph, those that call functions included.

A function's body has no shapes of its own: those of its arguments are known from the call, and are carried through the
body by simple rules (products, element by element, the rest as unknown). A loop counts its body as often as its
condition says, where that is a comparison with a constant, and `ASSUMED_TRIPS` times otherwise, which is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from smp_tf.partition.node_cost import FREE, FREE_OPS, FUNCTION_OPS, PER_OUTPUT, NodeCost, op_cost
from smp_tf.partition.node_def import attributes, functions
from smp_tf.partition.op_graph import VARIABLE, Node, OpGraph, Tensor, TensorType

#: How often the body of a loop is taken to run when nothing says how often.
ASSUMED_TRIPS = 16
_MAX_DEPTH = 16


def node_costs(graph: OpGraph, unknown: int = 1) -> tuple[NodeCost, ...]:
    """Cost of every node of a graph.

    Args:
        graph: the graph, with the library of the functions it calls.
        unknown: length assumed for dimensions that are not known.

    Returns:
        One cost a node.
    """
    library = functions(graph.library)
    costs = []
    for node in graph.nodes:
        inputs = [graph.type_of(t) for t in node.inputs]
        if node.op in FUNCTION_OPS and node.definition:
            given = [_constant(graph.nodes[t.node]) for t in node.inputs]
            held = [_held(graph, t, kind) for t, kind in zip(node.inputs, inputs, strict=True)]
            costs.append(_call_cost(node.op, attributes(node), held, given, library, unknown, 0))
        else:
            costs.append(op_cost(node, inputs, node.outputs, unknown))
    return tuple(costs)


def _held(graph: OpGraph, tensor: Tensor, kind: TensorType) -> TensorType:
    """Type of an argument; a variable's handle is given the shape of the variable."""
    node = graph.nodes[tensor.node]
    if node.op == VARIABLE and node.source is not None:
        return TensorType(kind.dtype, graph.variables[node.source].type.shape)
    return kind


def _constant(node: Node) -> int | None:
    """Value of a scalar integer constant."""
    if node.op != "Const" or not node.definition:
        return None
    return _scalar(attributes(node)["value"].tensor)


def _scalar(tensor: Any) -> int | None:
    if tensor.tensor_shape.dim:
        return None
    for values in (tensor.int_val, tensor.int64_val):
        if len(values):
            return int(values[0])
    if tensor.tensor_content and tensor.dtype in (3, 9):
        return int(
            np.frombuffer(tensor.tensor_content, np.int32 if tensor.dtype == 3 else np.int64)[0]
        )
    return 0 if tensor.dtype in (3, 9) else None


def _call_cost(
    op: str,
    attrs: Any,
    inputs: Sequence[TensorType],
    given: Sequence[int | None],
    library: dict[str, Any],
    unknown: int,
    depth: int,
) -> NodeCost:
    """Cost of a call: of the body, of the body as often as the loop runs, or of the dearest branch."""
    if depth > _MAX_DEPTH:
        return NodeCost(0.0, 0.0, frozenset({f"{op} (nested too deeply)"}))

    def body(name: str, types: Sequence[TensorType], values: Sequence[int | None]) -> NodeCost:
        if name not in library:
            return NodeCost(0.0, 0.0, frozenset({f"{op} (function {name!r} unknown)"}))
        return _body_cost(library[name], types, values, library, unknown, depth + 1)

    if op in ("While", "StatelessWhile"):
        once = body(attrs["body"].func.name, inputs, [None] * len(inputs))
        trips = _trips(library.get(attrs["cond"].func.name), given)
        if trips is None:
            once += NodeCost(0.0, 0.0, frozenset({f"{op} (taken to run {ASSUMED_TRIPS} times)"}))
        return once.times(ASSUMED_TRIPS if trips is None else trips)
    if op in ("If", "StatelessIf"):
        names = [attrs["then_branch"].func.name, attrs["else_branch"].func.name]
        return max(
            (body(n, inputs[1:], given[1:]) for n in names), key=lambda c: (c.flops, c.moved)
        )
    if op in ("Case", "StatelessCase"):
        names = [f.name for f in attrs["branches"].list.func]
        return max(
            (body(n, inputs[1:], given[1:]) for n in names),
            key=lambda c: (c.flops, c.moved),
            default=FREE,
        )
    return body(attrs["f"].func.name, inputs, given)


def _trips(condition: Any, given: Sequence[int | None]) -> int | None:
    """How often a loop runs: the smallest bound that its condition compares a counter with."""
    if condition is None:
        return None
    values: dict[str, int | None] = {
        arg.name: value for arg, value in zip(condition.signature.input_arg, given, strict=False)
    }
    bounds = []
    for node in condition.node_def:
        if node.op == "Const":
            values[f"{node.name}:output:0"] = _scalar(node.attr["value"].tensor)
        elif node.op in ("Identity", "Cast"):
            values[f"{node.name}:{'output' if node.op == 'Identity' else 'y'}:0"] = values.get(
                node.input[0]
            )
    for node in condition.node_def:
        if node.op in ("Less", "LessEqual") and len(node.input) >= 2:
            start, bound = values.get(node.input[0]), values.get(node.input[1])
            if bound is not None:
                bounds.append(bound - (start or 0) + (node.op == "LessEqual"))
    return max(min(bounds), 0) if bounds else None


def _body_cost(
    function: Any,
    inputs: Sequence[TensorType],
    given: Sequence[int | None],
    library: dict[str, Any],
    unknown: int,
    depth: int,
) -> NodeCost:
    """Sum over the ops of a function, with the shapes that can be told from its arguments."""
    known: dict[str, TensorType] = {}
    values: dict[str, int | None] = {}
    for arg, kind, value in zip(function.signature.input_arg, inputs, given, strict=False):
        known[arg.name], values[arg.name] = kind, value
    rows = (
        next((t.shape[0] for t in inputs if t.shape and len(t.shape) == 2 and t.shape[0]), None)
        or unknown
    )
    unsaid = TensorType("float32", None)
    total = FREE
    for definition in _in_order(function, known):
        names = [name for name in definition.input if not name.startswith("^")]
        types = [
            known.get(name) or known.get(name.partition(":")[0] + ":") or unsaid for name in names
        ]
        if definition.op in FUNCTION_OPS:
            passed = [values.get(name) for name in names]
            total += _call_cost(
                definition.op, definition.attr, types, passed, library, unknown, depth
            )
            continue
        if definition.op == "Const":
            tensor = definition.attr["value"].tensor
            shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
            known[f"{definition.name}:"] = TensorType("float32", shape)
            values[f"{definition.name}:output:0"] = _scalar(tensor)
            continue
        output = _output_type(definition, types, rows)
        known[f"{definition.name}:"] = output
        node = Node(
            definition.name, definition.op, (), (), (output,), definition.SerializeToString()
        )
        if definition.op not in FREE_OPS:
            total += op_cost(node, types, (output,), unknown)
    return total


def _in_order(function: Any, arguments: dict[str, TensorType]) -> list[Any]:
    """A body's nodes, each after the nodes it reads (a body may list them in any order)."""
    by_name = {node.name: node for node in function.node_def}
    done: set[str] = set()
    order: list[Any] = []
    for first in function.node_def:
        stack = [first]
        while stack:
            node = stack[-1]
            needs = {i.lstrip("^").partition(":")[0] for i in node.input}
            missing = [
                by_name[n]
                for n in sorted(needs)
                if n in by_name and n not in done and n not in arguments
            ]
            if node.name in done or not missing:
                stack.pop()
                if node.name not in done:
                    done.add(node.name)
                    order.append(node)
            else:
                stack.extend(missing)
    return order


def _output_type(definition: Any, inputs: Sequence[TensorType], rows: int) -> TensorType:
    """Type of the first output of an op inside a body, as far as simple rules tell."""
    dtype = next((t.dtype for t in inputs if t.dtype not in ("resource", "variant")), "float32")
    op = definition.op
    shapes = [t.shape for t in inputs]
    if op == "MatMul" and len(shapes) == 2:
        left, right = shapes
        first = (
            left[1 if definition.attr["transpose_a"].b else 0] if left and len(left) == 2 else rows
        )
        last = (
            right[0 if definition.attr["transpose_b"].b else 1]
            if right and len(right) == 2
            else None
        )
        return TensorType(dtype, (first, last))
    if op in PER_OUTPUT or op in (
        "Identity",
        "Cast",
        "ZerosLike",
        "OnesLike",
        "StopGradient",
        "AddN",
    ):
        longest = max(
            (s for s in shapes if s is not None), key=lambda s: (len(s), _size(s)), default=None
        )
        return TensorType(dtype, longest)
    if op == "ReadVariableOp" and inputs:
        return TensorType("float32", shapes[0] or None)
    if op == "Split" and len(shapes) == 2 and shapes[1] and shapes[1][-1]:
        return TensorType(
            dtype, (*shapes[1][:-1], shapes[1][-1] // max(definition.attr["num_split"].i, 1))
        )
    return TensorType(dtype, None)


def _size(shape: tuple[int | None, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim or 1
    return size

"""Estimates what one op costs, from its type and the types of its tensors alone.

Nothing is run and nothing is measured. Matrix products and convolutions are counted exactly. Every other op counts as a
number of operations per element. An op type that is not in the tables counts as elementwise and is reported, so that a
wrong guess can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from smp_tf.partition.graph.node_def import attributes
from smp_tf.partition.graph.op_graph import Node, TensorType
from smp_tf.partition.graph.op_kinds import (
    FACTORISATIONS,
    FREE_OPS,
    MATRIX_OPS,
    MOVING_OPS,
    PER_INPUT,
    PER_OUTPUT,
    POOLING_GRADIENTS,
    POOLING_OPS,
)


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What an op computes and moves each time it runs.

    Args:
        flops: floating-point operations.
        read: bytes read.
        written: bytes written.
        defaulted: op types that no table knows, which were counted as elementwise, and loops whose length was assumed.
    """

    flops: float
    read: float
    written: float
    defaulted: frozenset[str] = frozenset()

    @property
    def moved(self) -> float:
        """Returns the bytes read and written."""
        return self.read + self.written

    def __add__(self, other: NodeCost) -> NodeCost:
        return NodeCost(
            self.flops + other.flops,
            self.read + other.read,
            self.written + other.written,
            self.defaulted | other.defaulted,
        )

    def times(self, count: float) -> NodeCost:
        """Returns the cost of running `count` times."""
        return NodeCost(self.flops * count, self.read * count, self.written * count, self.defaulted)


FREE = NodeCost(0.0, 0.0, 0.0)
#: The ops that a table knows.
_KNOWN = frozenset({"AddN"}).union(
    *(FREE_OPS, MATRIX_OPS, MOVING_OPS, PER_OUTPUT, PER_INPUT, POOLING_OPS, POOLING_GRADIENTS, FACTORISATIONS)
)


def is_known(op: str) -> bool:
    """Returns whether a table knows an op type that calls no function."""
    return op in _KNOWN


def op_cost(node: Node, inputs: Sequence[TensorType], outputs: Sequence[TensorType], unknown: int = 1) -> NodeCost:
    """Returns the cost of one op that calls no function.

    Args:
        node: the op; only its type and its attributes are looked at.
        inputs: types of its data inputs.
        outputs: types of what it gives.
        unknown: length assumed for dimensions that are not known.

    Returns:
        The op's operations and bytes. An op type that no table knows is named in `defaulted`.
    """
    op = node.op
    if op in FREE_OPS:
        return FREE
    written = float(sum([kind.nbytes(unknown) for kind in outputs]))
    if op in MOVING_OPS:
        return NodeCost(0.0, written, written)
    read = float(sum([kind.nbytes(unknown) for kind in inputs]))
    if op in MATRIX_OPS:
        return NodeCost(_matrix_flops(node, inputs, outputs, unknown), read, written)
    taken = float(inputs[0].elements(unknown)) if inputs else 0.0
    if op in PER_INPUT:
        return NodeCost(PER_INPUT[op] * taken, read, written)
    given = float(sum([kind.elements(unknown) for kind in outputs]))
    if op in PER_OUTPUT:
        return NodeCost(PER_OUTPUT[op] * given, read, written)
    if op == "AddN":
        return NodeCost(max(len(inputs) - 1, 0) * given, read, written)
    if op in POOLING_OPS or op in POOLING_GRADIENTS:
        window = math.prod(attributes(node)["ksize"].list.i) if node.definition else 4
        windows = outputs[0] if op in POOLING_OPS else inputs[-1]
        return NodeCost(float(window * windows.elements(unknown)), read, written)
    if op in FACTORISATIONS:
        shape = inputs[0].shape if inputs else None
        side = shape[-1] if shape else None
        return NodeCost(taken * float(unknown if side is None else side), read, written)
    return NodeCost(given, read, written, frozenset({op}))


def _dims(kind: TensorType, unknown: int) -> list[float]:
    return [float(unknown if d is None else d) for d in kind.shape or ()]


def _matrix_flops(node: Node, inputs: Sequence[TensorType], outputs: Sequence[TensorType], unknown: int) -> float:
    """Counts two operations for every multiply-and-add."""
    op = node.op
    out = float(outputs[0].elements(unknown)) if outputs else 0.0
    if op == "Einsum":
        return _einsum_flops(node, inputs, out, unknown)
    if op.startswith(("MatMul", "BatchMatMul", "SparseMatMul")):
        left, result = _dims(inputs[0], unknown), _dims(outputs[0], unknown)
        if len(left) < 2 or len(result) < 2:
            # Inside a function, perhaps only the right matrix is known. Each of its entries meets each row.
            return (
                2.0 * max(out, inputs[0].elements(unknown))
                if len(result) < 2
                else (2.0 * inputs[1].elements(unknown) * math.prod(result[:-1]))
            )
        # The left matrix is rows x inner or, transposed, inner x rows. So inner is its size divided by the rows of the
        # result.
        return 2.0 * out * left[-1] * left[-2] / max(result[-2], 1.0)
    if op.startswith(("Conv", "DepthwiseConv")):
        depthwise = op.startswith("Depthwise")
        if op.removesuffix("V2").endswith("BackpropFilter"):
            kernel, positions = outputs[0], float(inputs[2].elements(unknown))
        elif op.removesuffix("V2").endswith("BackpropInput"):
            kernel, positions = inputs[1], float(inputs[2].elements(unknown))
        else:
            kernel, positions = inputs[1], out
        sides = _dims(kernel, unknown)
        # A kernel is [*window, in, out]. Each output of a depthwise convolution sees only one input channel.
        return 2.0 * positions * math.prod(sides[:-2] if depthwise else sides[:-1])
    # Sparse products and fused recurrent layers: each weight meets each row of the first input
    # once.
    rows = _dims(inputs[0], unknown)[:-1]
    weights = max((float(kind.elements(unknown)) for kind in inputs[1:]), default=1.0)
    return 2.0 * math.prod(rows) * weights


def _einsum_flops(node: Node, inputs: Sequence[TensorType], out: float, unknown: int) -> float:
    """Counts two operations per combination of all letters, and of what an ellipsis stands for."""
    equation = attributes(node)["equation"].s.decode() if node.definition else ""
    size: dict[str, float] = {}
    hidden = 1.0
    for term, kind in zip(equation.split("->")[0].replace(" ", "").split(","), inputs, strict=False):
        before, dots, after = term.partition("...")
        dims = _dims(kind, unknown)
        size.update(zip(before, dims, strict=False))
        if dots:
            size.update(zip(reversed(after), reversed(dims), strict=False))
            hidden = max(hidden, math.prod(dims[len(before) : len(dims) - len(after)]))
    if not size:
        return 2.0 * out
    return (2.0 if len(inputs) > 1 else 1.0) * hidden * math.prod(size.values())

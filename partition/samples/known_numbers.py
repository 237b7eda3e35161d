"""Computes small tensors of a step's graph that are made of constants alone, such as axes, and numbers of samples.

tf.cast(tf.shape(x)[0], tf.float32)     Const [n, d] ─▶ StridedSlice ─▶ Cast        n
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from smp_tf.partition.graph.node_def import attributes, constant
from smp_tf.partition.graph.op_graph import Node, OpGraph, Tensor

#: The most elements of a tensor that is computed.
_MOST = 1 << 16
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "Add": np.add, "AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply, "RealDiv": np.divide, "Div": np.divide,
    "FloorDiv": np.floor_divide, "FloorMod": np.mod, "Maximum": np.maximum, "Minimum": np.minimum, "Pow": np.power,
    "Neg": np.negative, "Sqrt": np.sqrt, "Square": np.square, "Exp": np.exp, "Log": np.log,
    "Reciprocal": np.reciprocal, "Inv": np.reciprocal, "Identity": np.asarray, "StopGradient": np.asarray,
}  # fmt: skip


class KnownNumbers:
    """The small tensors of a graph whose values are known before it runs.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._found: dict[int, Any] = {}

    def of(self, tensor: Tensor) -> Any:
        """Returns the value of a tensor, a NumPy array; None where it is not known."""
        if tensor.index:
            return None
        if tensor.node not in self._found:
            # Chains of constants are short. What is not known ends here at once.
            self._found[tensor.node] = None
            self._found[tensor.node] = self._computed(self._graph.nodes[tensor.node])
        return self._found[tensor.node]

    def _computed(self, node: Node) -> Any:
        kind = node.outputs[0] if len(node.outputs) == 1 else None
        if kind is None or not kind.is_static or math.prod(d or 0 for d in kind.shape or ()) > _MOST:
            return None
        if node.op == "Const":
            return constant(node) if kind.dtype != "string" else None
        compute = _OF_NUMBERS.get(node.op) or _BY_ATTRIBUTES.get(node.op)
        if compute is None:
            return None
        given = [self.of(other) for other in node.inputs]
        if any(value is None for value in given):
            return None
        with np.errstate(all="ignore"):
            found = compute(*given) if node.op in _OF_NUMBERS else compute(node, *given)
        return None if found is None else np.asarray(found)


def _cast(node: Node, value: Any) -> Any:
    try:
        return value.astype(node.outputs[0].dtype)
    except TypeError:
        return None


def _sliced(node: Node, value: Any, begin: Any, end: Any, by: Any) -> Any:
    """Returns one element of a row, or a part of it; None for other slices."""
    masks = attributes(node)
    if value.ndim != 1 or begin.size != 1 or masks["ellipsis_mask"].i or masks["new_axis_mask"].i:
        return None
    if masks["shrink_axis_mask"].i:
        return value[int(begin[0])]
    first = None if masks["begin_mask"].i else int(begin[0])
    last = None if masks["end_mask"].i else int(end[0])
    return value[first : last : int(by[0])]


def _packed(node: Node, *values: Any) -> Any:
    return np.stack(values, axis=int(attributes(node)["axis"].i))


_BY_ATTRIBUTES: dict[str, Callable[..., Any]] = {
    "Cast": _cast,
    "StridedSlice": _sliced,
    "Pack": _packed,
    "Range": lambda node, start, limit, delta: np.arange(start, limit, delta),
    "Prod": lambda node, value, axes: np.prod(value, axis=tuple(np.reshape(axes, -1).tolist())),
    "Reshape": lambda node, value, shape: np.reshape(value, node.outputs[0].shape),
    "ExpandDims": lambda node, value, axis: np.reshape(value, node.outputs[0].shape),
    "Squeeze": lambda node, value: np.reshape(value, node.outputs[0].shape),
    "ConcatV2": lambda node, *values: np.concatenate(values[:-1], axis=int(values[-1])),
    "GatherV2": lambda node, value, indices, axis: np.take(value, indices, axis=int(axis)),
}

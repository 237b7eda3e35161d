"""Makes up values of arguments, outputs and states, on which it is tried what samples count in a loss.

Labels often hold a number that says that something does not count, such as -100. No random number would meet it. So
numbers that a loss compares something with are among the values:

    tf.not_equal(labels, -100)     labels are 0, 1 or -100
    labels >= 0                    labels are 0, 1 or -1
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from smp_tf.partition.graph.node_def import constant
from smp_tf.partition.graph.op_graph import OpGraph, Tensor

_EQUAL = frozenset({"Equal", "NotEqual"})
_ORDERED = frozenset({"Greater", "GreaterEqual", "Less", "LessEqual"})
#: Ops that hand on a number as it is.
_SAME = frozenset({"Cast", "Identity"})


def compared_with(graph: OpGraph, nodes: Iterable[int]) -> tuple[float, ...]:
    """Returns the numbers that something is compared with, and for an order those around them.

    Args:
        graph: the step.
        nodes: those of its nodes that are looked at.
    """
    found: set[float] = set()
    for node in (graph.nodes[number] for number in nodes):
        if node.op in _EQUAL | _ORDERED:
            for value in (_constant(graph, tensor) for tensor in node.inputs):
                if value is not None:
                    found |= {value} if node.op in _EQUAL else {value - 1.0, value, value + 1.0}
        elif node.op == "IsNan":
            found.add(float("nan"))
    return tuple(sorted(found))


def made_up(
    spec: tf.TensorSpec, random: np.random.RandomState, *, is_share: bool = False, among: Iterable[float] = ()
) -> np.ndarray:
    """Returns values of a type: numbers of both signs, with zeros among them; small ones where they are whole.

    Args:
        spec: the type.
        random: draws them.
        is_share: whether they are between zero and one.
        among: numbers that are to be among them, where they are of the type.
    """
    dtype = spec.dtype.as_numpy_dtype
    if spec.dtype.is_floating and is_share:
        made = 0.05 + 0.9 * random.rand(*spec.shape)
    elif spec.dtype.is_floating:
        made = random.randn(*spec.shape) * (random.rand(*spec.shape) < 0.7)
    else:
        made = random.randint(0, 2, spec.shape)
    fitting = [value for value in among if spec.dtype.is_floating or _is_of(value, spec.dtype)]
    if fitting:
        made = np.where(random.rand(*spec.shape) < 0.4, random.choice(fitting, spec.shape), made)
    return np.asarray(made, dtype)


def _is_of(value: float, dtype: tf.DType) -> bool:
    """Returns whether a number is one of a type of whole numbers."""
    return dtype.is_integer and float(value).is_integer() and dtype.min <= value <= dtype.max


def _constant(graph: OpGraph, tensor: Tensor) -> float | None:
    """Returns the number that a tensor always is; None where it is no such."""
    node = graph.nodes[tensor.node]
    while node.op in _SAME:
        node = graph.nodes[node.inputs[0].node]
    if node.op != "Const":
        return None
    value = constant(node)
    return float(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind in "fiu" else None

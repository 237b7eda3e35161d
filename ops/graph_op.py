"""Adds an op to a graph by its node, without the checks of TensorFlow's public functions, and exempts ops from order.

On every call, `tf.Graph.create_op` looks at its own signature for a deprecated argument. That takes a third of its
time. A step has at least one op for each microbatch, and users wait for its first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


def add_op(
    graph: tf.Graph, kind: str, inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], attributes: Mapping[str, Any]
) -> tf.Operation:
    """Adds an op to a graph.

    The function is private in TensorFlow. It works with 2.16 and 2.21.

    Args:
        graph: the graph that is being traced.
        kind: the op's type.
        inputs: tensors of the graph.
        dtypes: types of its outputs.
        attributes: all attributes of its node, as `tf.compat.v1.AttrValue`.

    Returns:
        The op.
    """
    return graph._create_op_internal(kind, list(inputs), list(dtypes), attrs=dict(attributes))


def run_independently(operation: tf.Operation) -> None:
    """Exempts an op from the automatic control dependencies of the function that is being traced.

    It still runs once per execution of the function. Only its own edges order it against others.
    """
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)

"""Adds an op to a graph by its node, without the checks of the public ways to do so, and exempts ops from an order.

`tf.Graph.create_op` looks at its own signature on every call, for an argument that is deprecated, which takes a third
of its time. A step has an op or more for each microbatch, and users wait for its first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


def add_op(
    graph: tf.Graph, kind: str, inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], attributes: Mapping[str, Any]
) -> tf.Operation:
    """Adds an op to a graph.

    It is private in TensorFlow; seen to work with 2.16 and 2.21.

    Args:
        graph: the graph that is being traced.
        kind: the op's type.
        inputs: tensors of the graph.
        dtypes: of its outputs.
        attributes: all attributes of its node, as `tf.compat.v1.AttrValue`.

    Returns:
        The op.
    """
    return graph._create_op_internal(kind, list(inputs), list(dtypes), attrs=dict(attributes))


def run_independently(operation: tf.Operation) -> None:
    """Exempts an op from the automatic control dependencies of the function that is being traced.

    It still runs once per execution of the function; its order against others is what its own edges say.
    """
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)

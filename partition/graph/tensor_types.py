"""The types of tensors of a TensorFlow graph, as plain values."""

from __future__ import annotations

import tensorflow as tf

from smp_tf.partition import tf_internals
from smp_tf.partition.graph.op_graph import TensorType


def tensor_type(tensor: tf.Tensor) -> TensorType:
    """Returns the type that TensorFlow has inferred for a tensor of a graph."""
    entry = None
    if tensor.dtype == tf.variant and (listed := tf_internals.list_entry(tensor)):
        dtype, shape = listed
        entry = TensorType(dtype.name, static_shape(shape))
    return TensorType(tensor.dtype.name, static_shape(tensor.shape), entry)


def static_shape(shape: tf.TensorShape) -> tuple[int | None, ...] | None:
    """Returns a shape as a tuple, with None for an unknown length; None where even the rank is unknown."""
    return None if shape.rank is None else tuple(shape.as_list())

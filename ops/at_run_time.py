"""Passes a tensor on when the graph runs, so that nothing is computed from it while the graph is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.ops.graph_op import run_independently
from smp_tf.ops.library import tf_ops_library

__all__ = ["at_run_time"]


def at_run_time(value: tf.Tensor, handles: Sequence[Any] = ()) -> tf.Tensor:
    """Returns a tensor whose value TensorFlow does not know before the graph runs.

    When TensorFlow prepares a graph, it computes all ops that depend on constants alone, even those in which other
    processes take part. Without handles the op is exempt from automatic control dependencies.

    Args:
        value: A tensor of any type.
        handles: Resource tensors of variables. Automatic control dependencies then put the op after their earlier uses
            and before their later ones.

    Returns:
        The same tensor; in eager mode the same object.
    """
    if tf.executing_eagerly():
        return value
    same = tf_ops_library().smp_at_run_time(value=value, handles=list(handles))
    if not handles:
        run_independently(same.op)
    return same

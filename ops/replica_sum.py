"""Marks, while a step is traced, a tensor whose sum over the replicas the step needs for each microbatch.

    replica 0   value ──▶ SmpSumOverReplicas ──▶ sum        value ──▶ sends and receives ──▶ sum
    replica 1   value ──▶ SmpSumOverReplicas ──▶ sum        value ──▶ sends and receives ──▶ sum
                as it is traced                             as it runs

The gradient of such a sum is a sum over the replicas, too. A step multiplies what it adds up of gradients by the weight
of each microbatch, which differs between replicas with batches of other sizes. So a sum of gradients is weighed: each
replica's part by its own weight, and the sum by one over the weight of the replica that takes it.

    loss = w0 loss0(s) + w1 loss1(s),  s = v0 + v1        d loss / d v0 = w0 (w0 g0 + w1 g1) / w0
                                                          g0, g1: gradients of loss0 and loss1 by s
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smp_tf.ops.library import tf_ops_library

__all__ = ["sum_over_replicas"]


def sum_over_replicas(value: Any, label: str, *, weighed: bool = False) -> tf.Tensor:
    """Returns what stands for the sum of a tensor over the replicas.

    It runs only in a step that is cut. Whoever runs the step writes the sum in its place.

    Args:
        value: float32 or float64, of the same shape on all replicas.
        label: Words for the tensor in messages.
        weighed: Whether each replica's part counts as its microbatch does, in units of the own microbatch.

    Returns:
        A tensor of the same type and shape.
    """
    return tf_ops_library().smp_sum_over_replicas(value=value, label=label, weighed=weighed)


@tf.RegisterGradient("SmpSumOverReplicas")
def _gradient(operation: Any, gradient: tf.Tensor) -> tf.Tensor:
    label = operation.get_attr("label").decode()
    return sum_over_replicas(gradient, label, weighed=not operation.get_attr("weighed"))

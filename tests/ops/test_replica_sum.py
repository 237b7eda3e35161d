"""What stands for a sum over the replicas while a step is traced: its type, its gradient, and that it runs nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from smp_tf.ops.replica_sum import sum_over_replicas


def marks(graph: Any) -> list[tuple[str, bool, tuple[int, ...]]]:
    return [
        (op.get_attr("label").decode(), op.get_attr("weighed"), tuple(op.outputs[0].shape))
        for op in graph.get_operations()
        if op.type == "SmpSumOverReplicas"
    ]


def test_its_gradient_is_a_sum_of_gradients_weighed_and_so_on() -> None:
    def body(x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(sum_over_replicas(x, "moments") ** 3)
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    graph = tf.function(body).get_concrete_function(tf.TensorSpec([3], tf.float64)).graph
    assert marks(graph) == [
        ("moments", False, (3,)),
        ("moments", True, (3,)),
        ("moments", False, (3,)),
        ("moments", True, (3,)),
    ]


def test_run_as_it_is_it_says_where_it_exists() -> None:
    with pytest.raises(tf.errors.FailedPreconditionError, match="sum over the replicas of moments of norm exists in"):
        sum_over_replicas(tf.ones([2]), "moments of norm")


def test_it_takes_floats_whose_sums_are_exact_enough() -> None:
    with pytest.raises((TypeError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError)):
        sum_over_replicas(tf.ones([2], tf.float16), "moments")

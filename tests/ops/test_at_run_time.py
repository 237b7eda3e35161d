"""What is computed of a constant is computed when the graph runs, and not when it is prepared."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from smp_tf.ops.at_run_time import at_run_time


def kinds_after_optimization(passes: bool) -> list[str]:
    """The ops that are left of a product of constants, when TensorFlow has prepared the graph."""
    count = tf.Variable(0.0)

    @tf.function
    def run() -> tf.Tensor:
        constant = tf.fill([3], 2.0)
        value = at_run_time(constant) if passes else constant
        return tf.reduce_sum(tf.sqrt(value) * tf.exp(value)) + count.assign_add(1.0)

    context.enable_run_metadata()
    try:
        run()
        graphs = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    return [node.op for graph in graphs for node in graph.post_optimization_graph.node]


def test_tensorflow_knows_nothing_of_it() -> None:
    """Once a rank averaged a constant while it prepared its graph, and waited there for ranks that waited for it."""
    assert "Sqrt" not in kinds_after_optimization(passes=False)
    kinds = kinds_after_optimization(passes=True)
    assert "SmpAtRunTime" in kinds
    assert "Sqrt" in kinds


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.bool_, ml_dtypes.bfloat16, np.complex64])
def test_it_is_the_same_tensor(dtype: type) -> None:
    value = np.array([[0, 1], [1, 1]]).astype(dtype)
    eager = tf.constant(value)
    assert at_run_time(eager) is eager

    @tf.function
    def run(x: tf.Tensor) -> tf.Tensor:
        same = at_run_time(x)
        assert same.shape == x.shape
        return same

    np.testing.assert_array_equal(run(eager).numpy(), value)
    assert run(tf.constant("text")).numpy() == b"text"


def test_with_handles_it_has_its_place_among_the_uses_of_variables() -> None:
    variable, other = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def run(x: tf.Tensor) -> None:
        variable.assign(2.0)
        other.assign(2.0)
        at_run_time(x, [variable.handle])
        variable.assign(3.0)

    graph = run.get_concrete_function(tf.TensorSpec([])).graph
    first, beside, last = (op for op in graph.get_operations() if op.type == "AssignVariableOp")
    [passes] = [op for op in graph.get_operations() if op.type == "SmpAtRunTime"]
    assert first in passes.control_inputs
    assert beside not in passes.control_inputs
    assert passes in last.control_inputs

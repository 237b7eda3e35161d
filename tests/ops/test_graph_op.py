"""An op that is added by its node is like one that TensorFlow adds; an op that is exempt from the order still runs."""

from __future__ import annotations

import pytest
import tensorflow as tf

from smp_tf.ops.graph_op import add_op, run_independently


def test_an_op_is_added_as_tensorflow_would() -> None:
    """Fails where TensorFlow changes what `add_op` calls."""

    @tf.function
    def run(x: tf.Tensor) -> tf.Tensor:
        first, less = tf.nn.relu(x), x - 1.0
        graph = first.op.graph
        attributes = {name: first.op.node_def.attr[name] for name in first.op.node_def.attr}
        with tf.control_dependencies([first.op]), tf.name_scope("again"):
            second = add_op(graph, "Relu", [less], [tf.float32], attributes)
        assert [op.name for op in second.control_inputs] == [first.op.name]
        assert second.name.startswith("again/")
        return first + second.outputs[0]

    assert run(tf.constant([-1.0, 3.0])).numpy().tolist() == [0.0, 5.0]


@pytest.mark.parametrize("independent", [False, True])
def test_an_independent_op_gets_no_automatic_control_dependencies_but_still_runs(independent: bool) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        tf.raw_ops.PrintV2(input="a")
        second = tf.raw_ops.PrintV2(input="b")
        third = tf.raw_ops.PrintV2(input="c")
        if independent:
            run_independently(second)
        assert third.type == "PrintV2"
        return x

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([4])).graph
    first, second, third = (op for op in graph.get_operations() if op.type == "PrintV2")
    assert (first in second.control_inputs) is not independent
    assert (second in third.control_inputs) is not independent
    assert second in graph.control_outputs


def test_independence_needs_no_manager() -> None:
    """A graph without automatic control dependencies has none."""

    def step(x: tf.Tensor) -> tf.Tensor:
        run_independently(tf.raw_ops.PrintV2(input="a"))
        return x

    function = tf.function(step, autograph=False, experimental_attributes={"_disable_acd": True})
    assert function.get_concrete_function(tf.TensorSpec([4])).graph.experimental_acd_manager is None

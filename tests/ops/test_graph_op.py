"""An op that is added by its node is like one that TensorFlow adds."""

from __future__ import annotations

import tensorflow as tf

from smp_tf.ops.graph_op import add_op


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

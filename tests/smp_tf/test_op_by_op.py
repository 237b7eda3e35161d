"""What is kept out of XLA's clusters."""

from __future__ import annotations

import tensorflow as tf

from smp_tf.op_by_op import op_by_op


def flags(graph: tf.Graph) -> dict[str, bool]:
    return {
        op.name: "_XlaCompile" in op.node_def.attr and not op.node_def.attr["_XlaCompile"].b
        for op in graph.get_operations()
    }


def test_ops_of_a_function_are_kept_out_until_the_context_ends() -> None:
    @tf.function
    def traced(x: tf.Tensor) -> tf.Tensor:
        with op_by_op():
            x = tf.add(x, 1.0, name="within")
        return tf.multiply(x, 2.0, name="behind")

    found = flags(traced.get_concrete_function(tf.TensorSpec([], tf.float32)).graph)
    assert found["within"]
    assert not found["behind"]


def test_eager_ops_run_in_it_as_ever() -> None:
    with op_by_op():
        assert float(tf.add(1.0, 1.0)) == 2.0

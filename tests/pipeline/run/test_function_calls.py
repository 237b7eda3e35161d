"""The calls in the graph of a step: by name, or by TensorFlow's own op, with the same results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import tensorflow as tf

from smp_tf.pipeline.run.function_calls import FunctionCalls
from smp_tf.pipeline.run.segment_function import build_segment_function
from tests.pipeline.all_stages import BATCH, WIDTH, dense_chain


def test_what_xla_compiles_is_called_by_tensorflow() -> None:
    """Nothing else is told that XLA is to compile it."""
    step = dense_chain(1, 1, 1)
    segment = step.split.segments[0, 0, 0]
    functions = {xla: build_segment_function(step.graph, segment, step.variables[0], xla=xla) for xla in (True, False)}
    ops: Counter[str] = Counter()

    @tf.function
    def run(x: tf.Tensor) -> list[list[tf.Tensor]]:
        calls = FunctionCalls(by_name=True)
        made = [calls.add(functions[xla], [x]) for xla in (True, False, True, False)]
        ops.update(op.type for op in made)
        return [list(op.outputs) for op in made]

    results = run(tf.ones((BATCH, WIDTH)))
    assert sum(count for op, count in ops.items() if "PartitionedCall" in op) == ops["SmpCall"] == 2
    for compiled, plain, compiled_again, plain_again in zip(*results, strict=True):
        tf.debugging.assert_near(compiled, plain, rtol=1e-6)
        tf.debugging.assert_equal(compiled, compiled_again)
        tf.debugging.assert_equal(plain, plain_again)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_function_without_results_is_found_again(by_name: bool) -> None:
    """Beside a GPU all calls are TensorFlow's."""
    step = dense_chain(1, 1, 1)
    segment = step.split.segments[0, 0, 0]
    count = tf.Variable(0)
    function = build_segment_function(step.graph, segment, step.variables[0], outputs=())

    def body(x: tf.Tensor) -> list[tf.Tensor]:
        count.assign_add(x.shape[0] // BATCH)
        return []

    traced = tf.function(body, autograph=False, experimental_attributes={"_noinline": True})
    function = replace(function, function=traced.get_concrete_function(tf.TensorSpec((BATCH, WIDTH))))

    @tf.function
    def run(x: tf.Tensor) -> None:
        calls, made = FunctionCalls(by_name=by_name), []
        for _ in range(3):
            with tf.control_dependencies(made):
                made = [calls.add(function, [x])]
        assert (made[0].type == "SmpCall") == by_name

    run(tf.ones((BATCH, WIDTH)))
    assert count.numpy() == 3

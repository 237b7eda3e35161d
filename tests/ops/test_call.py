"""Functions that are called by name: as TensorFlow calls them, and without a copy of their body for each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.ops.call import call
from smp_tf.partition.tf_internals import optimizer_config


def concrete(body: Callable[..., Any], *shape: int) -> Any:
    function = tf.function(body, autograph=False, experimental_attributes={"_noinline": True})
    return function.get_concrete_function(tf.TensorSpec(shape))


def chained(function: Any, times: int) -> Any:
    """A function that calls another on its own results."""

    @tf.function(autograph=False)
    def run(x: tf.Tensor) -> list[tf.Tensor]:
        made: tf.Operation | None = None
        for _ in range(times):
            with tf.control_dependencies([made] if made is not None else []):
                made = call(function, [x], optimizer_config(), is_first=made is None)
            x = made.outputs[0]
        return [x]

    return run


def test_calls_do_what_the_function_does_one_after_the_other() -> None:
    count = tf.Variable(0.0)

    def body(x: tf.Tensor) -> list[tf.Tensor]:
        return [x * 2.0 + count.assign_add(1.0)]

    run = chained(concrete(body, 2), times=3)
    # ((x * 2 + 1) * 2 + 2) * 2 + 3
    assert run(tf.constant([0.0, 1.0]))[0].numpy().tolist() == [11.0, 19.0]
    assert run(tf.constant([0.0, 1.0]))[0].numpy().tolist() == [32.0, 40.0]
    assert count.numpy() == 6.0


def test_a_function_without_arguments_and_results_runs() -> None:
    count = tf.Variable(0)

    def body() -> list[tf.Tensor]:
        count.assign_add(1)
        return []

    function = tf.function(body, autograph=False).get_concrete_function()

    @tf.function
    def run() -> None:
        first = call(function, [], optimizer_config(), is_first=True)
        with tf.control_dependencies([first]):
            call(function, [], optimizer_config(), is_first=False)

    run()
    assert count.numpy() == 2


def test_only_the_first_call_holds_the_function() -> None:
    graph = chained(concrete(lambda x: [x + 1.0], 2), times=3).get_concrete_function(tf.TensorSpec([2])).graph
    calls = [op for op in graph.get_operations() if op.type == "SmpCall"]
    assert [len(op.get_attr("functions")) for op in calls] == [1, 0, 0]
    assert len({op.get_attr("function") for op in calls}) == 1


@pytest.mark.parametrize("optimized", [True, False])
def test_the_function_is_optimized_as_tensorflow_does(optimized: bool) -> None:
    """It was called as it had been traced: TensorFlow leaves the functions of a graph to the kernels that call them."""
    before = tf.config.optimizer.get_experimental_options()

    def body(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.control_dependencies([tf.debugging.Assert(x[0] > 0.0, ["not stripped"])]):
            return [x + 1.0]

    function = concrete(body, 2)
    tf.config.optimizer.set_experimental_options({"debug_stripper": optimized})
    try:
        run = chained(function, times=1).get_concrete_function(tf.TensorSpec([2]))
        if optimized:
            assert run(tf.constant([-1.0, 1.0]))[0].numpy().tolist() == [0.0, 2.0]
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match="not stripped"):
                run(tf.constant([-1.0, 1.0]))
    finally:
        tf.config.optimizer.set_experimental_options({"debug_stripper": before.get("debug_stripper", False)})


def test_a_function_that_the_graph_does_not_have_is_an_error() -> None:
    @tf.function
    def run(x: tf.Tensor) -> list[tf.Tensor]:
        made = call(function, [x], optimizer_config(), is_first=False)
        return list(made.outputs)

    function = concrete(lambda x: [x + 1.0], 2)
    with pytest.raises(tf.errors.OpError, match="Failed to find definition for function"):
        run(tf.constant([3.0, 0.0]))

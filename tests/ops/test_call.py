"""Functions that are called by name: as TensorFlow calls them, and without a copy of their body for each call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.ops.call import call
from smp_tf.ops.errors import NotDifferentiableError
from smp_tf.partition.tf_internals import call_options
from tests.distributed.harness import launch_script


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
                made = call(function, [x], call_options(), is_first=made is None)
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
        first = call(function, [], call_options(), is_first=True)
        with tf.control_dependencies([first]):
            call(function, [], call_options(), is_first=False)

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
        made = call(function, [x], call_options(), is_first=False)
        return list(made.outputs)

    function = concrete(lambda x: [x + 1.0], 2)
    with pytest.raises(tf.errors.OpError, match="Failed to find definition for function"):
        run(tf.constant([3.0, 0.0]))


def test_its_gradient_is_an_error_with_words() -> None:
    run = chained(concrete(lambda x: [x + 1.0], 2), times=1)
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(NotDifferentiableError, match="gradients within the step function"):
            run(x)


def test_what_is_stored_on_another_device_is_no_reason_to_run_there() -> None:
    """TensorFlow colocates an op with the variables that it takes, unless it is told not to."""
    ended = launch_script(1, "tests/ops/call_on_two_devices.py", launched=False).expect_clean()
    assert "[5.0, 5.0]" in ended.output(0)


def test_results_that_nobody_reads_are_computed() -> None:
    """TensorFlow leaves them out where it sees the function."""
    function = concrete(lambda x: [x + 1.0, 7 // tf.cast(x, tf.int32)])

    @tf.function(autograph=False)
    def run(x: tf.Tensor) -> tf.Tensor:
        return call(function, [x], call_options(), is_first=True).outputs[0]

    assert run(tf.constant(1.0)).numpy() == 2.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="division by zero"):
        run(tf.constant(0.0))


def test_the_body_is_not_copied_for_every_call() -> None:
    """64 calls by TensorFlow's own op take five times as much to begin as one (2.21)."""
    weights = [tf.Variable(tf.eye(2)) for _ in range(100)]

    def body(x: tf.Tensor) -> list[tf.Tensor]:
        for weight in weights:
            x = tf.tanh(x @ weight) + tf.reduce_mean(x)
        return [x]

    function = concrete(body, 2, 2)

    def first_run(times: int) -> float:
        run = chained(function, times).get_concrete_function(tf.TensorSpec([2, 2]))
        began = time.process_time()
        run(tf.ones([2, 2]))
        return time.process_time() - began

    first_run(1)
    one, many = (min(first_run(times) for _ in range(2)) for times in (1, 64))
    assert many < 3 * one, (one, many)

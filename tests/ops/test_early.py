"""What a function gives before it ends is there before it ends; who waits for it in vain is told, and does not hang."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.ops.call import call
from smp_tf.ops.early import give_early, take_early
from smp_tf.ops.graph_op import run_independently
from smp_tf.ops.library import tf_ops_library
from smp_tf.partition.tf_internals import call_options

#: Of no step of another test.
PROGRAM = 977


def concrete(body: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
    return tf.function(body, autograph=False, experimental_attributes={"_noinline": True}).get_concrete_function(*specs)


SPECS = tf.TensorSpec([3]), tf.TensorSpec([], tf.int64)


@pytest.mark.parametrize("by_name", [True, False], ids=["SmpCall", "TensorFlow's call"])
def test_it_is_there_while_the_function_still_runs(by_name: bool) -> None:
    """The function waits for what is made of it: were it there at the function's end alone, both would wait."""
    used = threading.Event()
    in_time: list[bool] = []

    def body(x: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
        given = give_early(x * 2.0, step, program=PROGRAM, number=0)
        with tf.control_dependencies([given]):
            tf.py_function(lambda: in_time.append(used.wait(60)), [], [])
        return [x + 1.0]

    function = concrete(body, *SPECS)

    @tf.function(autograph=False)
    def run(x: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
        if by_name:
            made = call(function, [x, step], call_options(), is_first=True).outputs
        else:
            made = function(x, step)
            run_independently(made[0].op)
        early = take_early(step, tf.float32, [3], program=PROGRAM, number=0)
        with tf.control_dependencies([early]):
            tf.py_function(used.set, [], [])
        return [made[0], early]

    for step in range(2):
        used.clear()
        made, early = run(tf.constant([1.0, 2.0, 3.0]), tf.constant(step, tf.int64))
        assert made.numpy().tolist() == [2.0, 3.0, 4.0]
        assert early.numpy().tolist() == [2.0, 4.0, 6.0]
    assert in_time == [True, True]


def test_what_was_given_first_is_kept_until_it_is_taken() -> None:
    step = tf.constant(3, tf.int64)
    for number in range(3):
        _give(tf.fill([2], float(number)), step, number)
    for number in (2, 0, 1):
        assert _take(step, number, [2]).numpy().tolist() == [float(number)] * 2


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.complex64, tf.bool, tf.string], ids=lambda dtype: dtype.name)
def test_tensors_of_any_type_and_shape_are_given(dtype: tf.DType) -> None:
    for shape in ([], [0], [2, 1, 3]):
        tensor = tf.fill(shape, "text") if dtype == tf.string else tf.cast(tf.fill(shape, 1), dtype)
        _give(tensor, tf.constant(0, tf.int64), 0)
        taken = tf_ops_library().smp_take_early(
            step=tf.constant(0, tf.int64), T=dtype, shape=shape, program=PROGRAM, number=0
        )
        assert taken.dtype == dtype
        np.testing.assert_array_equal(taken.numpy(), tensor.numpy())


def test_its_shape_is_known_in_the_graph() -> None:
    with tf.Graph().as_default():
        step = tf.constant(0, tf.int64)
        assert take_early(step, tf.float32, [None, 3], program=0, number=0).shape.as_list() == [None, 3]
        assert take_early(step, tf.float32, None, program=0, number=0).shape.rank is None


def test_a_function_that_fails_before_it_gives_ends_who_waits() -> None:
    def body(x: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(x < 0.0), ["positive"])]):
            give_early(tf.identity(x), step, program=PROGRAM, number=0)
        return [x]

    function = concrete(body, *SPECS)

    @tf.function(autograph=False)
    def run(x: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
        made = call(function, [x, step], call_options(), is_first=True).outputs
        return [made[0], take_early(step, tf.float32, [3], program=PROGRAM, number=0)]

    for step in range(50):
        # Its own error, not that what it should have given was cancelled.
        with pytest.raises(tf.errors.InvalidArgumentError, match="positive"):
            run(tf.ones([3]), tf.constant(step, tf.int64))
        # The next one is not disturbed by it.
        assert run(-tf.ones([3]), tf.constant(-step, tf.int64))[1].numpy().tolist() == [-1.0] * 3


def test_what_a_failed_step_left_is_freed_by_the_next_and_not_taken_for_its_own() -> None:
    held = np.ones([1 << 16], np.float32)
    gone = weakref.ref(held)
    _give(tf.constant(7.0), tf.constant(1, tf.int64), 0)
    # In the array's own memory, which TensorFlow lets go of with the last tensor of it.
    _give(tf.experimental.dlpack.from_dlpack(held.__dlpack__()), tf.constant(1, tf.int64), 1)
    del held
    gc.collect()
    assert gone() is not None
    _give(tf.constant(8.0), tf.constant(2, tf.int64), 0)
    gc.collect()
    assert gone() is None
    assert _take(tf.constant(2, tf.int64), 0, []).numpy() == 8.0


def test_who_waits_when_another_step_begins_is_told() -> None:
    failed: list[BaseException] = []

    @tf.function(autograph=False)
    def wait() -> tf.Tensor:
        return take_early(tf.constant(1, tf.int64), tf.float32, [], program=PROGRAM, number=4)

    def waiting() -> None:
        try:
            wait()
        except tf.errors.OpError as error:
            failed.append(error)

    thread = threading.Thread(target=waiting)
    thread.start()
    # Whichever comes first: what was given under another step is left, or ends who waits.
    deadline = threading.Event()
    while thread.is_alive() and not deadline.wait(0.05):
        _give(tf.constant(1.0), tf.constant(2, tf.int64), 4)
    thread.join(60)
    assert not thread.is_alive()
    [error] = failed
    assert isinstance(error, tf.errors.AbortedError)
    assert "when another step began" in str(error)


def test_another_type_than_was_given_is_an_error() -> None:
    _give(tf.constant(1.0), tf.constant(0, tf.int64), 0)
    with pytest.raises(tf.errors.InternalError, match="takes another type"):
        tf_ops_library().smp_take_early(step=tf.constant(0, tf.int64), T=tf.int32, shape=[], program=PROGRAM, number=0)


def _give(tensor: tf.Tensor, step: tf.Tensor, number: int) -> None:
    tf_ops_library().smp_give_early(tensor=tensor, step=step, program=PROGRAM, number=number)


def _take(step: tf.Tensor, number: int, shape: list[int]) -> Any:
    return tf_ops_library().smp_take_early(step=step, T=tf.float32, shape=shape, program=PROGRAM, number=number)

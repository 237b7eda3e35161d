"""Tensors of a step reach the script in the runs for which it has asked, and in no others."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.ops.keep import keep, take, want


@tf.function
def step(x: tf.Tensor) -> tf.Tensor:
    for microbatch in range(2):
        keep([x + microbatch, tf.cast(x, tf.int32)], "of a test", microbatch=microbatch)
    return x


def test_what_was_asked_for_is_there_once() -> None:
    want("of a test", True)
    step(tf.constant([1.0, 2.0]))
    for microbatch in range(2):
        floats, ints = take("of a test", microbatch, [tf.float32, tf.int32])
        np.testing.assert_array_equal(floats, [1.0 + microbatch, 2.0 + microbatch])
        np.testing.assert_array_equal(ints, [1, 2])
    with pytest.raises(tf.errors.NotFoundError, match=r"'of a test', microbatch 0: the step has not run"):
        take("of a test", 0, [tf.float32, tf.int32])
    want("of a test", False)


def test_nothing_is_kept_that_nobody_asked_for() -> None:
    step(tf.constant([1.0]))
    want("of another step", True)
    step(tf.constant([1.0]))
    want("of a test", True)
    with pytest.raises(tf.errors.NotFoundError):
        take("of a test", 0, [tf.float32, tf.int32])
    step(tf.constant([3.0]))
    want("of a test", False)
    with pytest.raises(tf.errors.NotFoundError):
        take("of a test", 0, [tf.float32, tf.int32])
    want("of another step", False)


def test_another_number_or_type_than_was_kept_is_an_error() -> None:
    for dtypes, words in (([tf.float32], "Asked for 1 tensors"), ([tf.int32, tf.int32], "of another type")):
        want("of a test", True)
        step(tf.constant([1.0]))
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            take("of a test", 0, dtypes)
    want("of a test", False)

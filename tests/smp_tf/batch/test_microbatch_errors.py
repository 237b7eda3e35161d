"""Errors of shape within a step say that it is given a microbatch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp

pytestmark = pytest.mark.usefixtures("keras_defaults")


def fixed(shape: tf.Tensor | list[int]) -> Callable[[], tf_keras.Model]:
    """A builder of a model whose layer reshapes what it is given to a fixed shape."""
    return lambda: tf_keras.Sequential(
        [tf_keras.Input((4,)), layers.Lambda(lambda x: tf.reshape(x, shape)), layers.Dense(1)]
    )


X, Y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)


def test_in_fit_while_the_step_is_traced(init: Callable[..., None]) -> None:
    init(microbatches=2)
    model = smp.DistributedModel(fixed([8, 4]))
    model.compile("sgd", "mse")
    words = "(?s)Cannot reshape.*Step 'train_step' is traced for a microbatch of 4 of the 8 samples.*microbatches to 1"
    with pytest.raises(ValueError, match=words):
        model.fit(X, Y, batch_size=8, verbose=0)


def test_in_a_loop_of_the_script_s_while_it_runs(init: Callable[..., None]) -> None:
    init(microbatches=3)
    wanted = tf.Variable([8, 4], trainable=False)
    model = smp.DistributedModel(tf_keras.Sequential([layers.Dense(1, input_shape=(4,))]))

    @smp.step
    def forward(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(model(x), wanted)

    words = "(?s)Step 'forward' runs on a microbatch of 3 or 2 of the 8 samples"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        forward(tf.constant(X))


def test_other_errors_are_left_as_they_are(init: Callable[..., None]) -> None:
    init(microbatches=2)
    model = smp.DistributedModel(tf_keras.Sequential([layers.Dense(1, input_shape=(4,))]))

    @smp.step
    def forward(x: tf.Tensor) -> tf.Tensor:
        model(x)
        raise ValueError("of the script's own")

    with pytest.raises(ValueError, match="of the script's own") as error:
        forward(tf.constant(X))
    assert "microbatch" not in str(error.value)


def test_hints_under_fit_name_no_option_of_a_step(init: Callable[..., None]) -> None:
    init(microbatches=2)
    model = smp.DistributedModel(tf_keras.Sequential([layers.Dense(1, input_shape=(4,))]))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"same number of samples: .*as many samples"):
        model.fit(tf.data.Dataset.from_tensors((X, Y[:6])), verbose=0)
    scalars = tf.data.Dataset.from_tensors((X, Y, 1.0))
    with pytest.raises(ValueError, match=r"is a scalar and cannot be cut into microbatches. Batch the data"):
        model.fit(scalars, verbose=0)


def test_an_optimizer_of_tensorflow_1_is_refused_in_words(init: Callable[..., None]) -> None:
    init(microbatches=2)
    model = smp.DistributedModel(tf_keras.Sequential([layers.Dense(1, input_shape=(4,))]))
    model.compile(tf.compat.v1.train.GradientDescentOptimizer(0.1), "mse")
    with pytest.raises(
        ValueError, match=r"assigns the trainable weight .*those of tf\.compat\.v1\.train assign at once"
    ):
        model.fit(X, Y, verbose=0)

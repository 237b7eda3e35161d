"""Sums, and averages over what labels choose, train as in plain Keras: samples count as in the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from tests.full_only import params
from tests.smp_tf.whole_batch.own_gradients import Uses
from tests.smp_tf.whole_batch.own_losses import LOSSES, compare, of_positives, total

pytestmark = pytest.mark.large


@pytest.mark.parametrize("loss", params(list(LOSSES), [loss for loss in LOSSES if loss != "detection"]))
def test_a_loss_counts_samples_as_in_the_whole_batch(init: Callable[..., None], loss: str) -> None:
    init(microbatches=4)
    assert compare(LOSSES[loss]) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("microbatches", [2, 3, 8])
@pytest.mark.parametrize("loss", ["total", "of_few"])
def test_that_is_so_for_any_number_of_microbatches(init: Callable[..., None], loss: str, microbatches: int) -> None:
    init(microbatches=microbatches)
    assert compare(LOSSES[loss]) < 1e-12


class AddsSum(layers.Layer):
    """As the variational autoencoders of many tutorials: the divergence, summed over the batch."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(1e-3 * tf.reduce_sum(tf.square(inputs)))
        return inputs


def test_a_sum_that_a_layer_adds_counts_samples_as_in_the_whole_batch(init: Callable[..., None]) -> None:
    init(microbatches=4)

    def build() -> Any:
        return tf_keras.Sequential([layers.Dense(8, input_shape=(6,)), AddsSum(), layers.Dense(3)])

    assert compare("mse", build) < 1e-12  # type: ignore[arg-type]


class AddsShare(layers.Layer):
    """As a divergence that a callback lets count more and more: what all samples add is multiplied by a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.share = tf.Variable(0.3, trainable=False, dtype=tf.float64, name="share")

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.share * tf.reduce_sum(tf.square(inputs)) / 16.0)
        return inputs


def test_a_sum_may_be_multiplied_by_a_weight_within_the_model(init: Callable[..., None]) -> None:
    """It is no layer that would have to run again for the whole batch."""
    init(microbatches=4, check_losses=False)

    def build() -> Any:
        return tf_keras.Sequential([layers.Dense(8, input_shape=(6,)), AddsShare(), layers.Dense(3)])

    model = smp.DistributedModel(build)
    plain = build()
    weights = Uses.weights([(6, 8), (8,), (8, 3), (3,)])
    found = []
    for one in (plain, model):
        one.build((None, 6))
        one.set_weights([*weights[:2], np.float64(0.3), *weights[2:]])
        one.compile(tf_keras.optimizers.SGD(0.01), "mse")
        history = one.fit(Uses.X, Uses.Y, batch_size=21, epochs=2, shuffle=False, verbose=0).history
        found.append([*one.get_weights(), np.asarray(history["loss"])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_a_scaled_loss_is_scaled_once(init: Callable[..., None]) -> None:
    init(microbatches=4)
    found = []
    for base in (tf_keras.Model, smp.DistributedModel):

        class Net(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__(name="net")
                self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(3)

            def call(self, x: Any) -> Any:
                return self.second(self.first(x))

            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape() as tape:
                    loss = of_positives(y, self(x, training=True))
                    scaled = self.optimizer.get_scaled_loss(loss)
                weights = self.trainable_variables
                gradients = self.optimizer.get_unscaled_gradients(tape.gradient(scaled, weights))
                self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
                return {"loss": loss}

        model = Net()
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 8), (8,), (8, 3), (3,))))
        inner = tf_keras.optimizers.SGD(0.05)
        model.compile(tf_keras.mixed_precision.LossScaleOptimizer(inner, dynamic=False, initial_scale=64))
        model.fit(Uses.X, Uses.Y, batch_size=21, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_of_two_losses_the_one_that_needs_it_is_told_what_samples_count(init: Callable[..., None]) -> None:
    """As the two players of a GAN, each with a tape and an optimizer of its own."""
    init(microbatches=3)
    found = []
    for base in (tf_keras.Model, smp.DistributedModel):

        class Two(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__(name="two")
                self.first, self.second = layers.Dense(3), layers.Dense(3)
                self.other = tf_keras.optimizers.SGD(0.02)

            def call(self, x: Any) -> Any:
                return self.first(x) + self.second(x)

            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape(persistent=True) as tape:
                    one, other = tf.reduce_mean(tf.square(y - self.first(x))), 0.1 * total(y, self.second(x))
                for loss, layer, optimizer in (
                    (one, self.first, self.optimizer),
                    (other, self.second, self.other),
                ):
                    weights = layer.trainable_variables
                    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
                return {"one": one, "other": other}

        model = Two()
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 3), (3,), (6, 3), (3,))))
        model.compile(tf_keras.optimizers.SGD(0.1))
        history = model.fit(Uses.X, Uses.Y, batch_size=21, epochs=2, shuffle=False, verbose=0).history
        found.append([*model.get_weights(), np.array(history["one"]), np.array(history["other"])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)

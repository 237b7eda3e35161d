"""Losses that compare samples train as in plain Keras: their gradient is taken once, by the whole batch's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf import announce
from tests.full_only import params
from tests.smp_tf.whole_batch.own_gradients import Uses
from tests.smp_tf.whole_batch.own_losses import COMPARING, compare, in_batch_softmax, rooted

pytestmark = pytest.mark.large


@pytest.mark.parametrize("loss", params(list(COMPARING), ["in_batch_softmax", "rooted", "uncorrelated"]))
def test_a_loss_compares_all_samples_of_the_batch(init: Callable[..., None], loss: str) -> None:
    init(microbatches=4)
    assert compare(COMPARING[loss]) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("microbatches", [2, 3, 8])
@pytest.mark.parametrize("loss", ["in_batch_softmax", "dice"])
def test_that_is_so_for_any_number_of_microbatches(init: Callable[..., None], loss: str, microbatches: int) -> None:
    init(microbatches=microbatches)
    assert compare(COMPARING[loss]) < 1e-12


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is announced, which is said once per process."""
    texts: set[str] = set()
    monkeypatch.setattr(announce, "_said", texts)
    return texts


def test_it_is_said_that_each_batch_runs_forward_twice(init: Callable[..., None], said: set[str]) -> None:
    init(microbatches=4)
    compare(rooted)
    assert sum("Each batch runs forward twice." in text for text in said) == 1


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "log_cosh", "categorical_crossentropy"])
def test_an_average_over_samples_runs_forward_once(init: Callable[..., None], said: set[str], loss: str) -> None:
    init(microbatches=4)
    model = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Dense(3, "softmax", input_shape=(6,))]))
    model.compile(tf_keras.optimizers.SGD(0.01), loss)
    model.fit(Uses.X, Uses.Y, batch_size=21, verbose=0)
    assert not any("forward twice" in text for text in said)


def test_two_views_of_a_batch_are_compared(init: Callable[..., None]) -> None:
    """As Keras's example of SimCLR: two calls of the encoder, and a loss over both, in a `train_step`."""
    init(microbatches=4)
    found = []
    for base in (tf_keras.Model, smp.DistributedModel):

        class Views(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__(name="views")
                self.encoder, self.head = layers.Dense(8, activation="tanh"), layers.Dense(3)

            def call(self, x: Any) -> Any:
                return self.head(self.encoder(x))

            def train_step(self, data: Any) -> Any:
                x, _ = data
                with tf.GradientTape() as tape:
                    one, other = self(x, training=True), self(x + 0.1 * tf.sin(9.0 * x), training=True)
                    loss = 0.5 * (in_batch_softmax(one, other) + in_batch_softmax(other, one))
                weights = self.trainable_variables
                gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.05)
                self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
                return {"loss": loss, "norm": norm}

        model = Views()
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 8), (8,), (8, 3), (3,))))
        model.compile(tf_keras.optimizers.SGD(0.1))
        history = model.fit(Uses.X, Uses.Y, batch_size=21, epochs=2, shuffle=False, verbose=0).history
        found.append([*model.get_weights(), np.array(history["loss"]), np.array(history["norm"])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11)


class Noisy(layers.Layer):
    """Adds noise, and notes in a weight what it has added."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight("seen", (shape[-1],), trainable=False, initializer="zeros")

    def call(self, inputs: Any) -> Any:
        noise = tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)
        self.seen.assign_add(tf.reduce_sum(noise, 0))
        return inputs + noise


def test_the_second_time_random_numbers_are_those_of_the_first(init: Callable[..., None]) -> None:
    """Else the gradient would be none of the loss; a layer's states are written once."""
    init(microbatches=4)
    model = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Dense(3, input_shape=(6,)), Noisy()]))
    model.compile(tf_keras.optimizers.SGD(1.0), rooted)
    model.build((None, 6))
    weights = Uses.weights(((6, 3), (3,)))
    model.set_weights([*weights, np.zeros(3)])
    x, y = Uses.X[:21], np.zeros((21, 3))
    model.fit(x, y, batch_size=21, shuffle=False, verbose=0)
    _, bias, seen = model.get_weights()
    # With y = 0, the sum of p is linear in the noise. d sqrt(mean p^2) / d bias = sum of p / (63 rms).
    loss = model.history.history["loss"][0]
    total = (x @ weights[0] + weights[1]).sum(0) + seen
    np.testing.assert_allclose(weights[1] - bias, total / (63 * loss), rtol=1e-10)


def test_a_smaller_last_batch_compares_its_own_samples(init: Callable[..., None]) -> None:
    init(microbatches=4)
    assert len(Uses.X) % 21
    assert compare(in_batch_softmax) < 1e-12

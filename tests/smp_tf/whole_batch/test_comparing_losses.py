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
from smp_tf.errors import StepError
from smp_tf.whole_batch import loss_coefficients, weighed_step
from tests.full_only import params
from tests.smp_tf.whole_batch.own_gradients import Uses
from tests.smp_tf.whole_batch.own_losses import COMPARING, compare, in_batch_softmax, rooted

pytestmark = pytest.mark.large

#: Losses of Keras's that are averages over samples.
AVERAGES = ["huber", "mse", "mae", "log_cosh", "categorical_crossentropy"]


@pytest.mark.parametrize("loss", params(list(COMPARING), set(COMPARING) - {"in_batch_softmax"}))
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


@pytest.mark.parametrize("loss", params(AVERAGES, AVERAGES[1:]))
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


def test_outputs_that_are_too_large_are_left_to_the_check(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 21 samples with 3 numbers of 8 bytes each."""
    monkeypatch.setattr(loss_coefficients, "_MOST_BYTES", 503)
    init(microbatches=4)
    with pytest.raises(StepError, match="another training in microbatches"):
        compare(in_batch_softmax)


def test_the_forward_pass_ahead_is_said_and_keeps_no_activations(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch, said: set[str]
) -> None:
    """Nothing runs backward in it, so nothing of a microbatch is kept for that."""
    init(microbatches=4)
    steps: list[Any] = []
    original = weighed_step.WeighedStep.__init__

    def noted(weighed: Any, in_words: str, step: Any, forward: Any, *args: Any, **more: Any) -> None:
        steps[:] = step, forward
        original(weighed, in_words, step, forward, *args, **more)

    monkeypatch.setattr(weighed_step.WeighedStep, "__init__", noted)
    assert compare(rooted) < 1e-12
    assert sum("Each batch runs forward twice." in text for text in said) == 1
    of_step, of_forward = (
        {tensor for program in step._programs.values() for tensor in program.stage_program.split.stash(stage=0)}
        for step in steps
    )
    assert of_step
    assert not of_forward


def views(x: Any) -> Any:
    """Two views of every sample: first one of each, and then the other of each."""
    return tf.concat([x, x + 0.1 * tf.sin(9.0 * x)], 0)


def told_apart(z: Any) -> Any:
    """As SimCLR: each view is to find the other one of its sample among all."""
    samples, z = tf.shape(z)[0] // 2, tf.math.l2_normalize(z, -1)
    logits = tf.matmul(z, z, transpose_b=True) / 0.5 - 1e9 * tf.eye(2 * samples, dtype=z.dtype)
    other = tf.concat([tf.range(samples) + samples, tf.range(samples)], 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(other, logits))


def sliced(z: Any) -> Any:
    samples = tf.shape(z)[0] // 2
    return in_batch_softmax(z[:samples], z[samples:])


#: By name, the loss of both views, which one call of the model has made.
OF_VIEWS: dict[str, Callable[[Any], Any]] = {
    "together": told_apart,
    "split": lambda z: in_batch_softmax(*tf.split(z, 2, 0)),
    "sliced": sliced,
}


@pytest.mark.parametrize("loss", params(list(OF_VIEWS), {"split", "sliced"}))
def test_two_views_go_through_the_model_in_one_call(init: Callable[..., None], loss: str) -> None:
    init(microbatches=4)
    assert compared_views(lambda model, x: OF_VIEWS[loss](model(views(x), training=True))) < 1e-11


@pytest.mark.full
def test_samples_that_are_repeated_one_by_one_are_refused(init: Callable[..., None]) -> None:
    """They are in another order than two views of all samples, so microbatches would be joined wrongly."""
    init(microbatches=4)
    with pytest.raises(StepError, match="another training in microbatches"):
        compared_views(lambda model, x: told_apart(model(tf.repeat(x, 2, 0))))


def compared_views(loss_of: Callable[[Any, Any], Any]) -> float:
    """Trains in plain Keras and split; returns the largest difference of weights and losses, relative to one."""
    found = []
    for base in (tf_keras.Model, smp.DistributedModel):

        class Views(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__(name="views")
                self.encoder, self.norm, self.head = layers.Dense(8), layers.LayerNormalization(), layers.Dense(3)

            def call(self, x: Any) -> Any:
                return self.head(tf.tanh(self.norm(self.encoder(x))))

            def train_step(self, data: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = loss_of(self, data[0])
                weights = self.trainable_variables
                self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
                return {"loss": loss}

        model = Views()
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 8), (8,), (8,), (8,), (8, 3), (3,))))
        model.compile(tf_keras.optimizers.SGD(0.1))
        history = model.fit(Uses.X, Uses.Y, batch_size=21, epochs=2, shuffle=False, verbose=0).history
        found.append([*model.get_weights(), np.array(history["loss"])])
    return max(float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in zip(*found, strict=True))


class Told(layers.Layer):
    """Adds a loss that tells all samples apart."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * in_batch_softmax(inputs, tf.square(inputs)))
        return inputs


def test_the_numbers_of_samples_within_a_layer_are_those_of_the_whole_batch(init: Callable[..., None]) -> None:
    """A row of numbers that a layer makes is as long as there are samples; the log had those of microbatches."""
    init(microbatches=4)

    def build() -> Any:
        return tf_keras.Sequential([layers.Dense(8, activation="tanh", input_shape=(6,)), Told(), layers.Dense(3)])

    assert compare("mse", build) < 1e-12  # type: ignore[arg-type]


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

"""Metrics and logs of `fit` and `evaluate` are computed once per batch: those of plain Keras, whatever they compute."""

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
from tests.smp_tf.whole_batch.own_metrics import masked_mean, metrics, net

pytestmark = pytest.mark.large

RANDOM = np.random.RandomState(3)
X = RANDOM.randn(18, 6)
Y = RANDOM.randn(18, 3)


def trained(model: Any, y: Any, **compiled: Any) -> dict[str, Any]:
    model.compile(tf_keras.optimizers.SGD(0.1), **compiled)
    weights = RANDOM_WEIGHTS[: len(X)]
    history = model.fit(X, y, sample_weight=weights, batch_size=7, epochs=2, shuffle=False, verbose=0).history
    return {**history, "evaluated": model.evaluate(X, y, batch_size=5, verbose=0), "weights": model.get_weights()}


RANDOM_WEIGHTS = RANDOM.rand(18)


def compare(build: Callable[[], Any], y: Any = Y, **compiled: Any) -> None:
    """Trains in plain Keras and in microbatches, with a smaller last batch, and wants equal numbers."""
    plain = build()
    model = smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))
    model.build((None, 6))
    model.set_weights(plain.get_weights())
    wanted = trained(plain, y, metrics=metrics(), **compiled)
    found = trained(model, y, metrics=metrics(), **compiled)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        for one, other in zip(found[name], values, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("microbatches", params([1, 2, 3, 4], [1, 2, 3]))
def test_metrics_are_those_of_the_whole_batch(init: Callable[..., None], microbatches: int) -> None:
    init(microbatches=microbatches)
    compare(net, (Y > 0).astype(np.float64), loss="mse")


@pytest.mark.full
def test_metrics_need_no_check_of_losses(init: Callable[..., None]) -> None:
    init(microbatches=2, check_losses=False)
    compare(net, (Y > 0).astype(np.float64), loss="mse")


class Tracked(tf_keras.Model):
    """Logs of its own, as Keras's guide to `train_step` has them, and what scripts add to it."""

    def __init__(self) -> None:
        super().__init__(name="tracked")
        self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(3)
        self.tracker = tf_keras.metrics.Mean(name="loss")
        self.worst = self.add_weight("worst", (), initializer="zeros", trainable=False)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - predicted))
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        self.tracker.update_state(loss)
        best = tf.reduce_max(predicted)
        return {"loss": self.tracker.result(), "best": best, "spread": {"std": tf.math.reduce_std(predicted)}}

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.tracker.update_state(tf.sqrt(tf.reduce_mean(tf.square(y - self(x)))))
        return {"loss": self.tracker.result()}


class SplitTracked(smp.DistributedModel, Tracked):
    pass


def test_logs_of_a_train_step_are_those_of_the_whole_batch(init: Callable[..., None]) -> None:
    init(microbatches=4)
    found = {}
    plain, split = Tracked(), SplitTracked()
    for model in (plain, split):
        model.build((None, 6))
    split.set_weights(plain.get_weights())
    for name, model in (("plain", plain), ("split", split)):
        model.compile(tf_keras.optimizers.SGD(0.1))
        seen: list[Any] = []
        keep = tf_keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, seen=seen: seen.append(logs))
        model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0, callbacks=[keep])
        seen.append(model.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True))
        found[name] = tf.nest.flatten(seen)
    np.testing.assert_allclose(found["split"], found["plain"], rtol=1e-9)


class Spread(layers.Layer):
    """Adds a metric that is computed of all samples."""

    def call(self, inputs: Any) -> Any:
        self.add_metric(tf.math.reduce_std(inputs), name="spread")
        return inputs


def test_a_metric_that_a_layer_computes_of_all_samples_is_that_of_the_batch(init: Callable[..., None]) -> None:
    init(microbatches=4)
    plain = tf_keras.Sequential([layers.Dense(4, input_shape=(6,)), Spread(), layers.Dense(3)])
    split = smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))
    split.build((None, 6))
    split.set_weights(plain.get_weights())
    found = []
    for model in (plain, split):
        model.compile(tf_keras.optimizers.SGD(0.1), "mse")
        history = model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0).history
        found.append([*history["spread"], *model.evaluate(X, Y, batch_size=5, verbose=0)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


def total(y: Any, p: Any) -> Any:
    return tf.reduce_sum(tf.square(y - p))


def contrastive(y: Any, p: Any) -> Any:
    scores, own = tf.matmul(p, y, transpose_b=True), tf.range(tf.shape(y)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=scores))


@pytest.mark.parametrize("loss", params([total, masked_mean, contrastive], [total, masked_mean]))
def test_an_evaluation_has_any_loss(init: Callable[..., None], loss: Any) -> None:
    init(microbatches=4)
    plain = net()
    split = smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))
    split.build((None, 6))
    split.set_weights(plain.get_weights())
    for model in (plain, split):
        model.compile("sgd", loss)
    wanted, found = (model.evaluate(X, Y, batch_size=7, verbose=0) for model in (plain, split))
    assert found == pytest.approx(wanted, rel=1e-9)


def test_a_last_batch_of_one_sample_is_trained_on(init: Callable[..., None]) -> None:
    """One process runs it in one piece. Its loss has a mask, and is weighed as those of other batches are."""
    init(microbatches=3)
    found = []
    plain = tf_keras.Sequential([layers.Masking(input_shape=(2, 3)), layers.Dense(3)])
    split = smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))
    split.build((None, 2, 3))
    split.set_weights(plain.get_weights())
    x = X[:7].reshape(-1, 2, 3).copy()
    x[6, 1] = x[2] = 0.0
    for model in (plain, split):
        model.compile(tf_keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        history = model.fit(x, x, batch_size=6, epochs=2, shuffle=False, verbose=0).history
        found.append([*model.get_weights(), history["loss"], history["mae"]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9)


class Averaged(smp.DistributedModel):
    """Logs what a layer keeps, which every microbatch changes."""

    def __init__(self) -> None:
        super().__init__(name="averaged")
        self.norm, self.last = layers.BatchNormalization(momentum=0.5), layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.norm(x, training=training))

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(data[1] - self(data[0], training=True)))
        kept = tf.reduce_sum(self.norm.moving_mean)
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss, "kept": kept}


def test_what_a_layer_keeps_is_logged_as_the_last_microbatch_leaves_it(init: Callable[..., None]) -> None:
    init(microbatches=3)
    model = Averaged()
    model.compile(tf_keras.optimizers.SGD(0.1))
    logs = model.train_on_batch(X + 1.0, Y, return_dict=True)
    assert logs["kept"] == pytest.approx(float(tf.reduce_sum(model.norm.moving_mean)), rel=1e-12)


def test_a_batch_of_any_size_is_computed_once(init: Callable[..., None], capfd: Any) -> None:
    """From the third size on one program takes all sizes, also where what is a constant for a size is none then."""
    init(microbatches=2)
    found = []
    plain = tf_keras.Sequential([layers.Dense(8, activation="tanh", input_shape=(6,)), layers.Dense(3, "sigmoid")])
    split = smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))
    split.build((None, 6))
    split.set_weights(plain.get_weights())
    for model in (plain, split):
        model.compile(tf_keras.optimizers.SGD(0.1), "mse", metrics=metrics())
        sizes = (8, 6, 5, 4, 7)
        found.append([model.train_on_batch(X[:size], Y[:size], reset_metrics=size == 4) for size in sizes])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)
    said = capfd.readouterr().err
    assert "one program that takes any size" in said
    assert "gets a program of its own" not in said, said

"""Losses that are sums over the batch, or are divided by a fixed number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers

from tests.distributed.siblings.script import Data, Keras, Script, trained


def variational(keras: Keras) -> Mapping[str, Any]:
    """An autoencoder whose layer adds the divergence of the batch; what it makes again is summed, too."""

    class Bottleneck(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = layers.Dense(3), layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            hidden, noise = inputs
            mean, spread = self.mean(hidden), self.spread(hidden)
            self.add_loss(-0.5 * tf.reduce_sum(1 + spread - tf.square(mean) - tf.exp(spread)))
            return mean + tf.exp(0.5 * spread) * noise

    def build() -> Any:
        pictures, noise = tf_keras.Input((6,)), tf_keras.Input((3,))
        code = Bottleneck()([layers.Dense(8, activation="tanh")(pictures), noise])
        return tf_keras.Model([pictures, noise], layers.Dense(6)(layers.Dense(8, activation="tanh")(code)))

    model = keras.wrap(build)
    model.compile(tf_keras.optimizers.Adam(0.01), loss=lambda y, p: tf.reduce_sum(tf.square(y - p)))
    return trained(model, [Data.X, Data.Y], Data.X, evaluates=True)


def by_global_batch_size(keras: Keras) -> Mapping[str, Any]:
    """As tutorials of `tf.distribute` have it, with losses of weights."""

    class Net(keras.own()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.last = layers.Dense(3, kernel_regularizer=tf_keras.regularizers.L2(0.01))
            self.each = tf_keras.losses.Huber(reduction=tf_keras.losses.Reduction.NONE)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                each = self.each(y, self(x, training=True))
                loss = tf.nn.compute_average_loss(each, global_batch_size=32)
                loss += tf.nn.scale_regularization_loss(tf.add_n(self.losses))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.1, momentum=0.9))
    return trained(model, Data.X, Data.Y)


def subclassed(keras: Keras) -> Mapping[str, Any]:
    """A loss of one's own, whose `call` returns one number."""

    class Total(tf_keras.losses.Loss):
        def call(self, y: Any, p: Any) -> Any:
            return tf.reduce_sum(tf.math.log(tf.cosh(y - p)))

    model = keras.net()
    model.compile(tf_keras.optimizers.SGD(0.01), Total(), metrics=["mae"])
    return trained(model, Data.X, Data.Y, evaluates=True)


def counts_over_ten(keras: Keras) -> Mapping[str, Any]:
    """One of two heads has a sum that is divided by ten."""

    def build() -> Any:
        x = tf_keras.Input((6,))
        hidden = layers.Dense(7, activation="tanh")(layers.Dense(8, activation="tanh")(x))
        heads = {"rate": layers.Dense(3, name="rate")(hidden), "kind": layers.Dense(4, name="kind")(hidden)}
        return tf_keras.Model(x, heads)

    def poisson(y: Any, p: Any) -> Any:
        return tf.reduce_sum(tf.exp(p) - y * p) / 10.0

    model = keras.wrap(build)
    kinds = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        tf_keras.optimizers.SGD(0.05),
        {"rate": poisson, "kind": kinds},
        loss_weights={"rate": 0.5, "kind": 2.0},
        metrics={"kind": "accuracy"},
    )
    return trained(model, Data.X, {"rate": Data.Y, "kind": Data.CLASSES}, evaluates=True)


def smoothed_labels(keras: Keras) -> Mapping[str, Any]:
    """Keras's own sum, with smoothed labels, weights of samples among which are zeros, and a metric of these."""
    model = keras.net(4)
    loss = tf_keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1, reduction="sum")
    model.compile(tf_keras.optimizers.SGD(0.05), loss, weighted_metrics=["accuracy"])
    labels = tf_keras.utils.to_categorical(Data.CLASSES, 4).astype("float64")
    return trained(model, Data.X, labels, sample_weight=Data.WEIGHTS)


def adds_in_call(keras: Keras) -> Mapping[str, Any]:
    """A model's own `call` adds what its hidden values weigh in all, and what its weights do."""

    class Net(keras.own()):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            hidden = self.third(self.second(self.first(x)))
            self.add_loss(1e-3 * tf.reduce_sum(tf.abs(hidden)))
            said = self.last(hidden)
            self.add_loss(1e-3 * tf.reduce_sum(tf.square(self.last.kernel)))
            return said

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.1), "mse")
    return trained(model, Data.X, Data.Y, shape=None)


def of_each_class(keras: Keras) -> Mapping[str, Any]:
    """Several tapes' sums: each class has an optimizer of its own for its head."""

    class Net(keras.own(2)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.other = layers.Dense(2)
            self.slow = tf_keras.optimizers.SGD(0.001)

        def call(self, x: Any) -> Any:
            hidden = self.third(self.second(self.first(x)))
            return self.last(hidden), self.other(hidden)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                one, other = self(x, training=True)
                total = tf.reduce_sum(tf.square(y[:, :2] - one))
                mean = tf.reduce_mean(tf.square(y[:, 1:] - other))
            of_total = self.first.trainable_variables + self.last.trainable_variables
            of_mean = self.second.trainable_variables + self.third.trainable_variables + self.other.trainable_variables
            self.slow.apply_gradients(zip(tape.gradient(total, of_total), of_total, strict=True))
            self.optimizer.apply_gradients(zip(tape.gradient(mean, of_mean), of_mean, strict=True))
            return {"total": total, "mean": mean}

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.1))
    return trained(model, Data.X, Data.Y)


SIBLINGS: dict[str, Script] = {
    script.__name__: script
    for script in (
        *(variational, by_global_batch_size, subclassed, counts_over_ten),
        *(smoothed_labels, adds_in_call, of_each_class),
    )
}

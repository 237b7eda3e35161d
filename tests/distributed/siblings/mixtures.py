"""Losses that compare samples, or compute something of what the model makes of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers

from tests.distributed.siblings.script import Data, Keras, Script, trained


def compiled(
    keras: Keras, loss: Callable[[Any, Any], Any], y: Any = Data.Y, outputs: int = 3, **more: Any
) -> Mapping[str, Any]:
    model = keras.net(outputs)
    model.compile(tf_keras.optimizers.SGD(0.05), loss, **more)
    return trained(model, Data.X, y, evaluates=True)


def in_batch_softmax(keras: Keras) -> Mapping[str, Any]:
    """Two towers and a temperature that is trained: each sample's pair is to be found among those of the batch."""

    class Towers(keras.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="towers")
            self.one, self.other = layers.Dense(5, activation="tanh"), layers.Dense(5, activation="tanh")
            self.middle, self.last = layers.Dense(6, activation="tanh"), layers.Dense(4)
            self.temperature = tf.Variable(0.5, dtype=tf.float64, name="temperature")

        def call(self, inputs: Any) -> Any:
            x, y = inputs
            one, other = (self.last(self.middle(v)) for v in (self.one(x), self.other(y)))
            return tf.math.l2_normalize(one, -1) * tf.exp(self.temperature), tf.math.l2_normalize(other, -1)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                one, other = self(data[0], training=True)
                scores = tf.matmul(one, other, transpose_b=True)
                own = tf.range(tf.shape(scores)[0])
                loss = 0.5 * tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores)
                    + tf.nn.sparse_softmax_cross_entropy_with_logits(own, tf.transpose(scores))
                )
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            return {"loss": loss}

    model = Towers()
    model.compile(tf_keras.optimizers.SGD(0.1))
    return trained(model, [Data.X, Data.Y], Data.CLASSES, shape=[(None, 6), (None, 3)])


def hardest_triplets(keras: Keras) -> Mapping[str, Any]:
    """For each sample the farthest of its class and the nearest of the others."""

    def triplets(y: Any, p: Any) -> Any:
        y = tf.reshape(y, [-1])
        apart = tf.reduce_sum(tf.square(p[:, None] - p[None]), -1)
        is_same = tf.cast(tf.equal(y[:, None], y[None]), p.dtype)
        farthest = tf.reduce_max(apart * is_same, 1)
        nearest = tf.reduce_min(apart + 1e3 * is_same, 1)
        return tf.reduce_mean(tf.nn.softplus(farthest - tf.minimum(nearest, 10.0)))

    return compiled(keras, triplets, Data.CLASSES)


def root_mean_square(keras: Keras) -> Mapping[str, Any]:
    return compiled(keras, lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p))), metrics=["mae"])


def uncorrelated(keras: Keras) -> Mapping[str, Any]:
    """One minus Pearson's correlation, for each output over the batch."""

    def loss(y: Any, p: Any) -> Any:
        y, p = y - tf.reduce_mean(y, 0), p - tf.reduce_mean(p, 0)
        below = tf.sqrt(tf.reduce_sum(tf.square(y), 0) * tf.reduce_sum(tf.square(p), 0)) + 1e-3
        return tf.reduce_mean(1.0 - tf.reduce_sum(y * p, 0) / below)

    return compiled(keras, loss)


def dice_of_batch(keras: Keras) -> Mapping[str, Any]:
    """Soft Dice, with what the model says of all samples in the divisor, besides a cross entropy."""

    def loss(y: Any, p: Any) -> Any:
        each, p = tf.nn.sigmoid_cross_entropy_with_logits(y, p), tf.sigmoid(p)
        return tf.reduce_mean(each) + 1.0 - 2.0 * tf.reduce_sum(y * p) / (tf.reduce_sum(y) + tf.reduce_sum(p))

    return compiled(keras, loss, (Data.Y > 0.3).astype("float64"))


def redundancy(keras: Keras) -> Mapping[str, Any]:
    """Two views, each output made normal over the batch: correlations are to be those of one thing (Barlow Twins)."""

    def loss(y: Any, p: Any) -> Any:
        one, other = tf.split(p, 2, axis=-1)
        one, other = ((v - tf.reduce_mean(v, 0)) / (tf.math.reduce_std(v, 0) + 1e-2) for v in (one, other))
        samples = tf.cast(tf.shape(one)[0], p.dtype)
        common = tf.matmul(one, other, transpose_a=True) / samples
        return tf.reduce_sum(tf.square(common - tf.eye(3, dtype=p.dtype)))

    def build() -> Any:
        one, other = tf_keras.Input((6,)), tf_keras.Input((6,))
        net = tf_keras.Sequential(
            [layers.Dense(8, activation="tanh"), layers.Dense(7), layers.Dense(5), layers.Dense(3)]
        )
        return tf_keras.Model([one, other], layers.Concatenate()([net(one), net(other)]))

    model = keras.wrap(build)
    model.compile(tf_keras.optimizers.SGD(0.02), loss)
    return trained(model, [Data.X, Data.X + 0.3 * Data.X[::-1]], Data.Y)


def hard_negatives(keras: Keras) -> Mapping[str, Any]:
    """A detector of one shot: of the negatives of the batch only the hardest count, three for each positive."""

    def loss(y: Any, p: Any) -> Any:
        each = tf.reshape(tf.nn.sigmoid_cross_entropy_with_logits(y, p), [-1])
        y = tf.reshape(y, [-1])
        positives = tf.reduce_sum(y)
        order = tf.argsort(tf.argsort(each * (1.0 - y), direction="DESCENDING"))
        is_hard = tf.cast(tf.cast(order, p.dtype) < 3.0 * positives, p.dtype) * (1.0 - y)
        return tf.reduce_sum(each * (y + is_hard)) / tf.maximum(positives, 1.0)

    return compiled(keras, loss, (Data.Y > 1.0).astype("float64"))


def variances(keras: Keras) -> Mapping[str, Any]:
    """A layer's hidden values are to spread over the batch (VICReg); the model's `call` adds that."""

    class Net(keras.own()):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                spread = tf.sqrt(tf.math.reduce_variance(p, 0) + 1e-4)
                loss = tf.reduce_mean(tf.square(y - p)) + tf.reduce_mean(tf.nn.relu(1.0 - spread))
            weights = self.trainable_variables
            gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.5)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss, "norm": norm}

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.1))
    return trained(model, Data.X, Data.Y)


SIBLINGS: dict[str, Script] = {
    script.__name__: script
    for script in (
        *(in_batch_softmax, hardest_triplets, root_mean_square, uncorrelated),
        *(dice_of_batch, redundancy, hard_negatives, variances),
    )
}

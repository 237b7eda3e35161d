"""Losses that depend on variables of the script, such as weights that are annealed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers

from tests.distributed.siblings.script import Data, Keras, Script, trained

#: Given the model, labels and what the model says, gives the loss, and logs.
LossOf = Callable[[Any, Any, Any], tuple[Any, Mapping[str, Any]]]


def with_loss(keras: Keras, loss_of: LossOf, **fit: Any) -> Mapping[str, Any]:
    """Trains a model whose `train_step` takes gradients of a loss that a function gives."""

    class Net(keras.own()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.last = layers.Dense(3, kernel_regularizer="l2")

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss, logs = loss_of(self, y, self(x, training=True))
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            return {"loss": loss, **logs}

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.05))
    return trained(model, Data.X, Data.Y, **fit)


def read_then_written(keras: Keras) -> Mapping[str, Any]:
    weight = tf.Variable(0.1, trainable=False, dtype=tf.float64)

    def loss_of(model: Any, y: Any, p: Any) -> Any:
        loss = tf.reduce_mean(tf.square(y - p)) + weight * tf.reduce_mean(tf.square(p))
        weight.assign_add(0.1)
        return loss, {"weight": weight.read_value()}

    return {**with_loss(keras, loss_of), "after": weight.numpy()}


def written_then_read(keras: Keras) -> Mapping[str, Any]:
    """A warm-up, by a counter of batches that is counted up first."""
    count = tf.Variable(0, trainable=False, dtype=tf.int64)

    def loss_of(model: Any, y: Any, p: Any) -> Any:
        count.assign_add(1)
        share = tf.minimum(tf.constant(1.0, p.dtype), tf.cast(count, p.dtype) / 4.0)
        return tf.reduce_mean(tf.square(y - p)) + share * tf.reduce_mean(tf.abs(p)), {"share": share}

    return {**with_loss(keras, loss_of), "after": count.numpy()}


def written_thrice(keras: Keras) -> Mapping[str, Any]:
    """A sum whose weight decays, is read, is set anew, and is read again."""
    weight = tf.Variable(0.5, trainable=False, dtype=tf.float64)

    def loss_of(model: Any, y: Any, p: Any) -> Any:
        weight.assign_sub(0.05)
        loss = 0.1 * weight * tf.reduce_sum(tf.square(y - p))
        weight.assign(weight * 0.9)
        loss += weight * tf.add_n(model.losses)
        weight.assign_add(0.01)
        return loss, {}

    return {**with_loss(keras, loss_of), "after": weight.numpy()}


def annealed_by_a_callback(keras: Keras) -> Mapping[str, Any]:
    """A sum over the batch, and losses of weights whose share a callback sets."""
    share = tf_keras.backend.variable(0.0, dtype="float64")

    def loss_of(model: Any, y: Any, p: Any) -> Any:
        return 0.1 * tf.reduce_sum(tf.square(y - p)) + share * tf.add_n(model.losses), {}

    class Annealing(tf_keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            tf_keras.backend.set_value(share, 0.5 * epoch)

    return with_loss(keras, loss_of, callbacks=[Annealing()], epochs=3)


def annealed_within_the_model(keras: Keras) -> Mapping[str, Any]:
    """What a model's own `call` adds is a sum times a variable of the model, which is 0 in the first batch."""

    class Net(keras.own()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.share = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="share")

        def call(self, x: Any) -> Any:
            hidden = self.third(self.second(self.first(x)))
            self.add_loss(self.share * tf.reduce_sum(tf.square(hidden)) / 16.0)
            return self.last(hidden)

    class Annealing(tf_keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            tf_keras.backend.set_value(self.model.share, 0.5 * epoch)

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.05), "mse")
    return trained(model, Data.X, Data.Y, callbacks=[Annealing()], epochs=3, shape=None)


SIBLINGS: dict[str, Script] = {
    script.__name__: script
    for script in (
        *(read_then_written, written_then_read, written_thrice),
        *(annealed_by_a_callback, annealed_within_the_model),
    )
}

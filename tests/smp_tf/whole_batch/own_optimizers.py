"""Optimizers whose own code makes something of all gradients together, as scripts have them, and a training of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from tests.smp_tf.whole_batch.own_gradients import Uses


class Scaling(tf_keras.optimizers.SGD):
    """Divides by the norm of all."""

    def apply_gradients(self, grads_and_vars: Any, **more: Any) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(g**2) for g in gradients]))
        return super().apply_gradients(zip([g / norm for g in gradients], variables, strict=True), **more)


class Averaging(tf_keras.optimizers.SGD):
    """Divides by a moving average of the largest element, in a variable of its own."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.largest = tf.Variable(1.0, dtype=tf.float64, trainable=False)

    def apply_gradients(self, grads_and_vars: Any, **more: Any) -> Any:
        pairs = list(grads_and_vars)
        largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(g)) for g, _ in pairs]))
        scale = self.largest.assign(0.9 * self.largest + 0.1 * largest)
        return super().apply_gradients([(g / scale, v) for g, v in pairs], **more)


class Sorting(tf_keras.optimizers.SGD):
    """Keeps the larger half of all elements."""

    def apply_gradients(self, grads_and_vars: Any, **more: Any) -> Any:
        pairs = list(grads_and_vars)
        every = tf.sort(tf.concat([tf.reshape(tf.abs(g), [-1]) for g, _ in pairs], 0))
        least = every[every.shape[0] // 2]
        kept = [(tf.where(tf.abs(g) >= least, g, tf.zeros_like(g)), v) for g, v in pairs]
        return super().apply_gradients(kept, **more)


class Clipping(tf_keras.optimizers.Adam):
    """Clips by the norm of all, by TensorFlow's own function."""

    def apply_gradients(self, grads_and_vars: Any, **more: Any) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        return super().apply_gradients(zip(gradients, variables, strict=True), **more)


OPTIMIZERS = {one.__name__: one for one in (Scaling, Averaging, Sorting, Clipping)}


def compare(optimizer: Any) -> float:
    """Trains in plain Keras and split; returns the largest difference of weights and losses, relative to one."""
    found = []
    plain = tf_keras.Sequential([layers.Dense(8, "tanh", input_shape=(6,)), layers.Dense(7, "tanh"), layers.Dense(3)])
    weights = Uses.weights([weight.shape for weight in plain.get_weights()])
    for model in (plain, smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))):
        model.build((None, 6))
        model.set_weights(weights)
        model.compile(optimizer(0.05), "mse")
        history = model.fit(Uses.X, Uses.Y, batch_size=21, epochs=2, shuffle=False, verbose=0).history
        found.append([*model.get_weights(), np.asarray(history["loss"])])
    return max(float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in zip(*found, strict=True))

"""One training step of a model of `tf_keras.applications`, split over the processes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import smp_tf as smp

CLASSES = 3


def one_step(model: str, size: int, built: bool) -> dict[str, Any]:
    """Builds the model, takes a step on two samples, and says who stores what.

    Args:
        model: its name in `tf_keras.applications`.
        size: pixels of an image's side.
        built: whether smp_tf is given the built model, or a function that builds it.
    """
    tf_keras.backend.clear_session()
    began = time.monotonic()

    def build() -> tf_keras.Model:
        make = getattr(tf_keras.applications, model)
        return make(weights=None, input_shape=(size, size, 3), classes=CLASSES)

    net = smp.DistributedModel(build() if built else build)
    optimizer = tf_keras.optimizers.SGD(1e-3)

    @smp.step
    def step(images: tf.Tensor, labels: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            probabilities = net(images, training=True)
            losses = tf_keras.losses.sparse_categorical_crossentropy(labels, probabilities)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, net.trainable_variables), loss, probabilities

    @tf.function
    def train(images: tf.Tensor, labels: tf.Tensor) -> Any:
        gradients, loss, probabilities = step(images, labels)
        sums = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
        return loss.reduce_mean(), probabilities.concat()

    images = np.random.RandomState(0).uniform(0, 255, (2, size, size, 3)).astype(np.float32)
    loss, probabilities = train(tf.constant(images), tf.constant([0, 2]))
    own = {id(variable) for variable in net.local_variables}
    return {
        "loss": float(loss),
        "probabilities": probabilities,
        "sum": 1.0 if net.layers[-1].activation is tf_keras.activations.softmax else 0.0,
        "stored": [id(variable) in own for variable in net.variables],
        "iterations": int(optimizer.iterations.numpy()),
        "seconds": time.monotonic() - began,
    }

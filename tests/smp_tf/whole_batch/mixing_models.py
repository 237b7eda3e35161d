"""A model that compares the samples of a batch before its last layer, and trainings of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp


class Centred(layers.Layer):
    """Takes the mean over the batch from its input."""

    def call(self, x: Any) -> Any:
        return x - tf.reduce_mean(x, axis=0)


def mixing(name: str) -> Any:
    """A split model that mixes samples."""

    def build() -> Any:
        return tf_keras.Sequential(
            [layers.Dense(8, input_shape=(6,)), layers.BatchNormalization(), Centred(name="centred"), layers.Dense(3)],
            name=name,
        )

    return smp.DistributedModel(build)


def data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels."""
    random = np.random.RandomState(0)
    return random.randn(samples, 6), random.randn(samples, 3)


def fitted(name: str, samples: int) -> None:
    """Trains for two epochs, and evaluates."""
    model, (x, y) = mixing(name), data(samples)
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=samples, epochs=2, verbose=0, validation_data=(x, y))

"""Metrics that are no averages over samples, and a model for them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers


def one_number(y: Any, p: Any) -> Any:
    return tf_keras.backend.mean(tf.abs(y - p))


def f1(y: Any, p: Any) -> Any:
    truth, said = tf.cast(y > 0.0, p.dtype), tf.cast(p > 0.0, p.dtype)
    return 2.0 * tf.reduce_sum(truth * said) / (tf.reduce_sum(truth) + tf.reduce_sum(said) + 1e-7)


def masked_mean(y: Any, p: Any) -> Any:
    """Some microbatches have no element that counts: of them alone it is not a number."""
    counts = tf.cast(tf.reduce_min(y, -1, keepdims=True) > 0.0, p.dtype)
    return tf.reduce_sum(counts * tf.square(y - p)) / tf.reduce_sum(counts)


def ranked(y: Any, p: Any) -> Any:
    """Where each sample would stand among all samples of the batch: a metric that compares samples."""
    order = tf.argsort(tf.argsort(p[:, 0]))
    wanted = tf.argsort(tf.argsort(y[:, 0]))
    return tf.reduce_mean(tf.abs(tf.cast(order - wanted, p.dtype)))


def by_their_number(y: Any, p: Any) -> Any:
    """A sum of shares: each sample's error is divided by the number of samples in the batch."""
    return tf.reduce_sum(tf.reduce_sum(tf.square(y - p), 1) / tf.cast(tf.shape(y)[0], p.dtype))


class Largest(tf_keras.metrics.Metric):
    """The largest batch mean seen so far: its state is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.value.assign(tf.maximum(self.value, tf.cast(tf.reduce_mean(tf.abs(y - p)), self.value.dtype)))

    def result(self) -> Any:
        return self.value


class Batches(tf_keras.metrics.Metric):
    """Counts its updates."""

    def __init__(self) -> None:
        super().__init__(name="batches")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(1.0)

    def result(self) -> Any:
        return self.count


def metrics() -> list[Any]:
    return [
        *(one_number, f1, masked_mean, by_their_number, ranked, "RootMeanSquaredError", Largest(), Batches()),
        tf_keras.metrics.PrecisionAtRecall(0.5, num_thresholds=9, name="precision"),
    ]


def net() -> tf_keras.Model:
    return tf_keras.Sequential(
        [layers.Dense(8, activation="tanh", input_shape=(6,), kernel_regularizer="l2"), layers.Dense(3, "sigmoid")]
    )

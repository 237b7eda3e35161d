"""Losses that microbatches do not average to that of the batch, as scripts have them, and a training of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from tests.smp_tf.whole_batch.own_batches import fit_arguments
from tests.smp_tf.whole_batch.own_gradients import Uses


def total(y: Any, p: Any) -> Any:
    return tf.reduce_sum(tf.square(y - p))


def over_sixteen(y: Any, p: Any) -> Any:
    """As scripts have it that come from `tf.distribute`; the last batches are smaller."""
    return tf.nn.compute_average_loss(tf.reduce_mean(tf.square(y - p), -1), global_batch_size=16)


def of_positives(y: Any, p: Any) -> Any:
    """As detection losses: averaged over the positives."""
    chosen = tf.cast(y > 0.3, p.dtype)
    return tf.reduce_sum(chosen * tf.square(y - p)) / tf.reduce_sum(chosen)


def of_few(y: Any, p: Any) -> Any:
    """Some microbatches have none of those that count; alone they would give NaN."""
    few = tf.cast(y[:, :1] > 0.5, p.dtype)
    return tf.reduce_sum(few * tf.square(p)) / tf.reduce_sum(few)


def detection(y: Any, p: Any) -> Any:
    """The cross entropy of the positives, averaged over them."""
    positive = tf.cast(y > 0.3, p.dtype)
    each = tf.nn.sigmoid_cross_entropy_with_logits(positive, p)
    return tf.reduce_sum(each * positive) / tf.reduce_sum(positive)


def weighted_sum(y: Any, p: Any) -> Any:
    """Weights that the labels give, and a constant factor."""
    weights = tf.nn.softmax(y, -1)
    return 0.01 * tf.reduce_sum(weights * tf.abs(y - p)) / tf.reduce_max(weights)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    loss.__name__: loss for loss in (total, over_sixteen, of_positives, of_few, detection, weighted_sum)
}


def in_batch_softmax(y: Any, p: Any) -> Any:
    """Every sample is told from all others of the batch, as in contrastive training (SimCLR, CLIP)."""
    logits = tf.matmul(tf.math.l2_normalize(p, -1), tf.math.l2_normalize(y, -1), transpose_b=True) / 0.2
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(p)[0]), logits))


def rooted(y: Any, p: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(tf.square(y - p)))


def uncorrelated(y: Any, p: Any) -> Any:
    """One minus Pearson's correlation over the batch."""
    a, b = y - tf.reduce_mean(y, 0), p - tf.reduce_mean(p, 0)
    return 1 - tf.reduce_sum(a * b) / tf.sqrt(tf.reduce_sum(a * a) * tf.reduce_sum(b * b) + 1e-6)


def redundant(y: Any, p: Any) -> Any:
    """Off the diagonal of the correlation of the outputs, as Barlow Twins have it."""
    a, b = [(v - tf.reduce_mean(v, 0)) / (tf.math.reduce_std(v, 0) + 1e-3) for v in (y, p)]
    correlation = tf.matmul(a, b, transpose_a=True) / tf.cast(tf.shape(p)[0], p.dtype)
    return tf.reduce_sum(tf.square(correlation - tf.eye(3, dtype=p.dtype)))


def dice(y: Any, p: Any) -> Any:
    """Of the whole batch, as segmentation has it, where some images hold nothing."""
    found, wanted = tf.sigmoid(p), tf.cast(y > 0.3, p.dtype)
    return 1 - (2 * tf.reduce_sum(found * wanted) + 1) / (tf.reduce_sum(found) + tf.reduce_sum(wanted) + 1)


def hardest(y: Any, p: Any) -> Any:
    """The mean of the largest losses of a batch, as online hard example mining has it."""
    each = tf.reduce_mean(tf.square(y - p), -1)
    return tf.reduce_mean(tf.sort(each)[-3:])


#: Losses that compare samples, or compute something of an average.
COMPARING: dict[str, Callable[[Any, Any], Any]] = {
    loss.__name__: loss for loss in (in_batch_softmax, rooted, uncorrelated, redundant, dice, hardest)
}


def net() -> tf_keras.Model:
    return tf_keras.Sequential(
        [
            layers.Dense(8, activation="tanh", input_shape=(6,), kernel_regularizer="l2"),
            layers.Dense(8),
            layers.Dense(3),
        ]
    )


def compare(loss: Callable[[Any, Any], Any], build: Callable[[], Any] = net, **compiled: Any) -> float:
    """Trains in plain Keras and split; returns the largest difference of weights and logs, relative to one."""
    found = []
    plain = build()
    weights = Uses.weights([weight.shape for weight in plain.get_weights()])
    for model in (plain, smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))):
        model.build((None, 6))
        model.set_weights(weights)
        model.compile(tf_keras.optimizers.SGD(0.01), loss, metrics=["mae"], **compiled)
        given = fit_arguments(Uses.X, Uses.Y, is_split=model is not plain)
        history = model.fit(**given, epochs=2, verbose=0).history
        found.append([*model.get_weights(), *(np.asarray(history[key]) for key in sorted(history))])
    return max(float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in zip(*found, strict=True))

"""Metrics, trackers and logs that are none of single microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers

from tests.distributed.siblings.script import Data, Keras, Script, trained


def perplexity(keras: Keras) -> Mapping[str, Any]:
    """A tracker of perplexities, and the perplexity of a tracker of losses; the largest loss of a sample so far."""

    class Net(keras.own(4)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean = tf_keras.metrics.Mean(name="mean")
            self.perplexity = tf_keras.metrics.Mean(name="perplexity")

        @property
        def metrics(self) -> Any:
            return [self.mean, self.perplexity]

        def loss_of(self, x: Any, y: Any, training: bool) -> Any:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x, training=training))
            loss = tf.reduce_mean(each)
            self.mean.update_state(each)
            self.perplexity.update_state(tf.exp(loss))
            return loss, {"largest": tf.reduce_max(each), "spread": tf.math.reduce_std(each)}

        def logs(self) -> Any:
            return {"of_mean": tf.exp(self.mean.result()), **{m.name: m.result() for m in self.metrics}}

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss, more = self.loss_of(x, y, training=True)
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            return {"loss": loss, **more, **self.logs()}

        def test_step(self, data: Any) -> Any:
            _, more = self.loss_of(*data, training=False)
            return {**more, **self.logs()}

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.1))
    return trained(model, Data.X, Data.CLASSES, evaluates=True)


class Agreement(tf_keras.metrics.Metric):
    """Cohen's kappa, of a matrix of confusion; and what the last batch alone has said."""

    def __init__(self, classes: int) -> None:
        super().__init__(name="agreement")
        self.matrix = self.add_weight(name="matrix", shape=(classes, classes), initializer="zeros")
        self.last = self.add_weight(name="last", initializer="zeros")
        self.classes = classes

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        said = tf.math.confusion_matrix(tf.reshape(y, [-1]), tf.argmax(p, -1), self.classes, dtype=self.matrix.dtype)
        self.matrix.assign_add(said)
        self.last.assign(self.kappa(said))

    def reset_state(self) -> None:
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))

    @staticmethod
    def kappa(matrix: Any) -> Any:
        share = matrix / tf.reduce_sum(matrix)
        chance = tf.reduce_sum(tf.reduce_sum(share, 0) * tf.reduce_sum(share, 1))
        return (tf.linalg.trace(share) - chance) / (1.0 - chance + 1e-7)

    def result(self) -> Any:
        return {"kappa": self.kappa(self.matrix), "kappa_of_last": self.last}


def confusion(keras: Keras) -> Mapping[str, Any]:
    """A metric with a matrix of confusion, and Keras's own with thresholds."""
    model = keras.net(4)
    model.compile(
        tf_keras.optimizers.SGD(0.1),
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[Agreement(4), "accuracy"],
    )
    found = trained(model, Data.X, Data.CLASSES)
    return {**found, **{f"e {k}": v for k, v in evaluated(model).items()}}


def evaluated(model: Any) -> Mapping[str, Any]:
    said = model.evaluate(Data.X, Data.CLASSES, batch_size=15, verbose=0, return_dict=True)
    return dict(tf.nest.map_structure(float, said))


def dice(keras: Keras) -> Mapping[str, Any]:
    """Dice and IoU, for every sample and over the batch."""

    def of_batch(y: Any, p: Any) -> Any:
        p = tf.sigmoid(p)
        return (2.0 * tf.reduce_sum(y * p) + 1.0) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1.0)

    def of_each(y: Any, p: Any) -> Any:
        p = tf.sigmoid(p)
        return (2.0 * tf.reduce_sum(y * p, -1) + 1.0) / (tf.reduce_sum(y, -1) + tf.reduce_sum(p, -1) + 1.0)

    def iou_of_batch(y: Any, p: Any) -> Any:
        said = tf.cast(p > 0.0, y.dtype)
        common = tf.reduce_sum(y * said)
        return common / tf.maximum(tf.reduce_sum(tf.maximum(y, said)), 1.0)

    model = keras.net()
    metrics = [of_batch, of_each, iou_of_batch, tf_keras.metrics.AUC(num_thresholds=20, from_logits=True, name="auc")]
    model.compile(tf_keras.optimizers.SGD(0.1), tf_keras.losses.BinaryCrossentropy(from_logits=True), metrics=metrics)
    return trained(model, Data.X, (Data.Y > 0.3).astype("float64"), evaluates=True)


def correlation(keras: Keras) -> Mapping[str, Any]:
    """How much is explained, and a correlation: quotients of moments of the batch."""

    def explained(y: Any, p: Any) -> Any:
        left = tf.reduce_sum(tf.square(y - p))
        return 1.0 - left / tf.reduce_sum(tf.square(y - tf.reduce_mean(y, axis=0)))

    def pearson(y: Any, p: Any) -> Any:
        y, p = y - tf.reduce_mean(y, 0), p - tf.reduce_mean(p, 0)
        below = tf.sqrt(tf.reduce_sum(tf.square(y), 0) * tf.reduce_sum(tf.square(p), 0))
        return tf.reduce_mean(tf.reduce_sum(y * p, 0) / (below + 1e-7))

    model = keras.net()
    model.compile(tf_keras.optimizers.SGD(0.1), "huber", metrics=[explained, pearson])
    return trained(model, Data.X, Data.Y, evaluates=True)


class Median(tf_keras.metrics.Metric):
    """A moving average of each batch's median error, weighted by samples."""

    def __init__(self) -> None:
        super().__init__(name="median")
        self.value = self.add_weight(name="value", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros", dtype="int64")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        errors = tf.sort(tf.reduce_mean(tf.abs(y - p), -1))
        middle = errors[tf.shape(errors)[0] // 2]
        is_first = tf.equal(self.batches, 0)
        self.value.assign(tf.where(is_first, middle, 0.9 * self.value + 0.1 * middle))
        self.batches.assign_add(1)

    def result(self) -> Any:
        return self.value


def medians(keras: Keras) -> Mapping[str, Any]:
    """A metric that sorts the samples of a batch, and counts batches."""
    model = keras.net()
    model.compile(tf_keras.optimizers.SGD(0.1), "mse", metrics=[Median()], weighted_metrics=["mae"])
    return trained(model, Data.X, Data.Y, sample_weight=Data.WEIGHTS)


def calibration(keras: Keras) -> Mapping[str, Any]:
    """The expected error of calibration: samples in bins, each with its accuracy and its confidence."""

    def calibrated(y: Any, p: Any) -> Any:
        p = tf.nn.softmax(p)
        sure, said = tf.reduce_max(p, -1), tf.cast(tf.argmax(p, -1), p.dtype)
        right = tf.cast(tf.equal(said, tf.cast(tf.reshape(y, [-1]), p.dtype)), p.dtype)
        bins = tf.minimum(tf.cast(sure * 5.0, tf.int32), 4)
        off = tf.math.unsorted_segment_sum(right - sure, bins, 5)
        return tf.reduce_sum(tf.abs(off)) / tf.cast(tf.size(sure), p.dtype)

    model = keras.net(4)
    model.compile(
        tf_keras.optimizers.SGD(0.1),
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[calibrated, "accuracy"],
    )
    return trained(model, Data.X, Data.CLASSES, evaluates=True)


def of_a_layer(keras: Keras) -> Mapping[str, Any]:
    """A layer and a model each add a metric of hidden values."""

    class Watched(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_metric(tf.reduce_mean(tf.abs(x)), name="hidden")
            return x

    class Net(keras.own()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.watched = Watched()

        def call(self, x: Any) -> Any:
            hidden = self.watched(self.third(self.second(self.first(x))))
            self.add_metric(tf.reduce_mean(hidden, -1), name="of_each")
            return self.last(hidden)

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.1), "mse")
    return trained(model, Data.X, Data.Y, evaluates=True, shape=None)


SIBLINGS: dict[str, Script] = {
    script.__name__: script for script in (perplexity, confusion, dice, correlation, medians, calibration, of_a_layer)
}

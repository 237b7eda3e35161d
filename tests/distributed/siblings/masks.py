"""Averages over what labels, masks and weights of samples choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers

from tests.distributed.siblings.script import Data, Keras, Script, trained


def masked_words(keras: Keras) -> Mapping[str, Any]:
    """A masked language model: only words that were masked are to be said, and some sequences have none."""

    def masked(y: Any, p: Any) -> Any:
        is_asked = tf.cast(tf.not_equal(y, -100), p.dtype)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(y, 0), p)
        return tf.reduce_sum(each * is_asked) / tf.reduce_sum(is_asked)

    def accuracy(y: Any, p: Any) -> Any:
        is_asked, said = tf.not_equal(y, -100), tf.cast(tf.argmax(p, -1), y.dtype)
        return tf.reduce_sum(tf.cast(is_asked & tf.equal(said, y), p.dtype)) / tf.reduce_sum(tf.cast(is_asked, p.dtype))

    def build() -> Any:
        words = tf_keras.Input((7,), dtype="int64")
        hidden = layers.Embedding(11, 6)(words)
        hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 3)(hidden, hidden))
        return tf_keras.Model(words, layers.Dense(11)(layers.Dense(8, activation="gelu")(hidden)))

    model = keras.wrap(build)
    model.compile(tf_keras.optimizers.Adam(0.01), masked, metrics=[accuracy])
    return trained(model, Data.WORDS, Data.MASKED, evaluates=True)


def focal_over_positives(keras: Keras) -> Mapping[str, Any]:
    """A detector: the focal loss of all anchors over the number of positives, boxes of positives over it, too."""

    def focal(y: Any, p: Any) -> Any:
        each = tf.nn.sigmoid_cross_entropy_with_logits(y, p)
        sure = y * tf.sigmoid(p) + (1.0 - y) * (1.0 - tf.sigmoid(p))
        weight = (y * 0.25 + (1.0 - y) * 0.75) * tf.square(1.0 - sure)
        return tf.reduce_sum(weight * each) / tf.maximum(tf.constant(1.0, p.dtype), tf.reduce_sum(y))

    def boxes(y: Any, p: Any) -> Any:
        is_positive, off = y[..., :1], tf.abs(y[..., 1:] - p)
        smooth = tf.where(off < 1.0, 0.5 * tf.square(off), off - 0.5)
        return tf.reduce_sum(is_positive * smooth) / tf.maximum(tf.constant(1.0, p.dtype), tf.reduce_sum(is_positive))

    def build() -> Any:
        x = tf_keras.Input((6,))
        hidden = layers.Dense(7, activation="tanh")(layers.Dense(8, activation="tanh")(x))
        where = layers.Reshape((3, 2), name="where")(layers.Dense(6)(hidden))
        return tf_keras.Model(x, {"what": layers.Dense(3, name="what")(hidden), "where": where})

    positives = (Data.Y > 1.0).astype("float64")
    places = Data.PLACES
    labels = {"what": positives, "where": tf.concat([positives[..., None], places], -1).numpy()}
    model = keras.wrap(build)
    losses = {"what": focal, "where": boxes}
    model.compile(tf_keras.optimizers.SGD(0.05), losses, loss_weights={"what": 1.0, "where": 0.5})
    return trained(model, Data.X, labels, evaluates=True)


def balanced_classes(keras: Keras) -> Mapping[str, Any]:
    """Each class of the batch counts the same, however many samples it has."""

    def balanced(y: Any, p: Any) -> Any:
        y = tf.reshape(y, [-1])
        one_hot = tf.one_hot(y, 4, dtype=p.dtype)
        counts = tf.reduce_sum(one_hot, 0)
        weights = tf.reduce_sum(one_hot * tf.math.divide_no_nan(tf.ones_like(counts), counts), -1)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
        return tf.reduce_sum(weights * each) / tf.reduce_sum(weights)

    model = keras.net(4)
    model.compile(tf_keras.optimizers.SGD(0.1), balanced)
    return trained(model, Data.X, Data.CLASSES, evaluates=True)


def boolean_mask(keras: Keras) -> Mapping[str, Any]:
    """The mean of what a mask of labels lets through, by `tf.boolean_mask`."""

    def chosen(y: Any, p: Any) -> Any:
        return tf.reduce_mean(tf.boolean_mask(tf.square(y - p), y > 0.3))

    model = keras.net()
    model.compile(tf_keras.optimizers.SGD(0.1), chosen)
    return trained(model, Data.X, Data.Y, evaluates=True)


def by_lengths(keras: Keras) -> Mapping[str, Any]:
    """Sequences whose lengths come with them; some are empty."""

    class Net(keras.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="words")
            self.words, self.hidden = layers.Embedding(11, 6), layers.LSTM(5, return_sequences=True)
            self.between, self.head = layers.Dense(6, activation="tanh"), layers.Dense(11)

        def call(self, words: Any) -> Any:
            return self.head(self.between(self.hidden(self.words(words))))

        def train_step(self, data: Any) -> Any:
            (words, lengths), following = data
            with tf.GradientTape() as tape:
                scores = self(words, training=True)
                counts = tf.sequence_mask(lengths, tf.shape(words)[1], scores.dtype)
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(following, scores)
                loss = tf.reduce_sum(each * counts) / tf.reduce_sum(counts)
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss, "bits": loss / tf.math.log(tf.constant(2.0, tf.float64))}

    model = Net()
    model.build((None, 7))
    model.compile(tf_keras.optimizers.SGD(0.5, global_clipnorm=0.5))
    return trained(model, [Data.WORDS, Data.LENGTHS], Data.WORDS[:, ::-1].copy())


def weighted_mean(keras: Keras) -> Mapping[str, Any]:
    """Weights that `fit` hands to a `train_step`, by whose sum is divided; labels are smoothed."""

    class Net(keras.own(4)):  # type: ignore[misc]
        def loss_of(self, data: Any, training: bool) -> Any:
            x, y, counts = data
            smooth = tf.one_hot(y, 4, dtype=tf.float64) * 0.9 + 0.025
            each = tf.nn.softmax_cross_entropy_with_logits(smooth, self(x, training=training))
            return tf.reduce_sum(each * counts) / tf.reduce_sum(counts)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_of(data, training=True)
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            return {"loss": loss}

        def test_step(self, data: Any) -> Any:
            return {"loss": self.loss_of((*data, tf.ones(tf.shape(data[1]), tf.float64)), training=False)}

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.3))
    return trained(model, Data.X, Data.CLASSES, sample_weight=Data.WEIGHTS + 0.01, evaluates=True)


def half_labelled(keras: Keras) -> Mapping[str, Any]:
    """Few samples have labels; the others are to be said alike from a picture and from its copy."""

    def some(y: Any, p: Any) -> Any:
        one, copy = tf.split(p, 2, axis=-1)
        has_label = tf.cast(y >= 0, p.dtype)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(y, 0), one)
        apart = tf.reduce_mean(tf.square(tf.nn.softmax(one) - tf.stop_gradient(tf.nn.softmax(copy))), -1)
        without = 1.0 - has_label
        mean = tf.math.divide_no_nan(tf.reduce_sum(each * has_label), tf.reduce_sum(has_label))
        return mean + 0.5 * tf.math.divide_no_nan(tf.reduce_sum(apart * without), tf.reduce_sum(without))

    def loss(y: Any, p: Any) -> Any:
        return some(tf.reshape(y, [-1]), p)

    def build() -> Any:
        one, copy = tf_keras.Input((6,)), tf_keras.Input((6,))
        net = tf_keras.Sequential(
            [layers.Dense(8, activation="tanh"), layers.Dense(7), layers.Dense(5), layers.Dense(4)]
        )
        return tf_keras.Model([one, copy], layers.Concatenate()([net(one), net(copy)]))

    labels = Data.CLASSES.copy()
    labels[Data.WEIGHTS > 0.3] = -1
    model = keras.wrap(build)
    model.compile(tf_keras.optimizers.SGD(0.2), loss)
    return trained(model, [Data.X, Data.X + 0.1 * Data.X[::-1]], labels)


SIBLINGS: dict[str, Script] = {
    script.__name__: script
    for script in (
        *(masked_words, focal_over_positives, balanced_classes, boolean_mask),
        *(by_lengths, weighted_mean, half_labelled),
    )
}

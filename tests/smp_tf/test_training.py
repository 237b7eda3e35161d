"""`fit`, `evaluate` and `predict` give what plain Keras gives, whatever the number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import StepError

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(22, 6).astype(np.float32)
CLASSES = RANDOM.randint(0, 3, 22)
NUMBERS = RANDOM.randn(22, 2).astype(np.float32)
WEIGHTS = RANDOM.rand(22).astype(np.float32)

FROM_LOGITS = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier() -> tf_keras.Model:
    return tf_keras.Sequential([layers.Dense(8, activation="tanh", input_shape=(6,)), layers.Dense(3)])


def two_outputs() -> tf_keras.Model:
    inputs = tf_keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh", name="hidden")(inputs)
    outputs = [layers.Dense(3, name="kind")(hidden), layers.Dense(2, name="size")(hidden)]
    return tf_keras.Model(inputs, outputs, name="two")


def with_losses() -> tf_keras.Model:
    inputs = tf_keras.Input((6,))
    hidden = layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2", name="hidden")(inputs)
    outputs = layers.Dense(3, name="head")(hidden)
    model = tf_keras.Model(inputs, outputs)
    model.add_loss(0.1 * tf.reduce_mean(hidden**2))
    return model


class Meter(tf_keras.metrics.Metric):
    """A stateful metric of the user's own."""

    def __init__(self) -> None:
        super().__init__(name="meter")
        self.largest = self.add_weight("largest", initializer="zeros")
        self.count = self.add_weight("count", initializer="zeros", dtype=tf.int32)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))
        self.count.assign_add(tf.shape(y_pred)[0])

    def result(self) -> tf.Tensor:
        return self.largest + tf.cast(self.count, tf.float32)


def batches(size: int, known: bool = True) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices((X, CLASSES))
    if known:
        return dataset.batch(size)
    return dataset.batch(size).map(lambda x, y: (tf.ensure_shape(x, [None, 6]), y)).apply(
        tf.data.experimental.assert_cardinality(-(-22 // size))
    )


class Sequence(tf_keras.utils.Sequence):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        part = slice(5 * index, 5 * index + 5)
        return X[part], CLASSES[part]


def generator() -> Iterator[Any]:
    while True:
        yield X[:8], CLASSES[:8]
        yield X[8:16], CLASSES[8:16]


PLAIN = {"loss": FROM_LOGITS, "metrics": ["accuracy"]}
ARRAYS = {"x": X, "y": CLASSES, "batch_size": 8}
BOTH = {"x": X, "y": {"kind": CLASSES, "size": NUMBERS}, "batch_size": 8}

#: Name -> (builder, what `compile` is given, what `fit` is given).
CASES: dict[str, tuple[Callable[[], Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "arrays, the last batch ragged": (classifier, PLAIN, ARRAYS),
    "validation data": (classifier, PLAIN, {**ARRAYS, "validation_data": (X[:9], CLASSES[:9])}),
    "validation split": (classifier, PLAIN, {**ARRAYS, "validation_split": 0.3, "batch_size": 5}),
    "validation every second epoch": (
        classifier, PLAIN, {**ARRAYS, "validation_data": (X[:9], CLASSES[:9]), "validation_freq": 2},
    ),
    "shuffled": (classifier, PLAIN, {**ARRAYS, "shuffle": True}),
    "sample weights": (
        classifier, {**PLAIN, "weighted_metrics": ["accuracy"]}, {**ARRAYS, "sample_weight": WEIGHTS},
    ),
    "class weights": (classifier, PLAIN, {**ARRAYS, "class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
    "a dataset": (classifier, PLAIN, {"x": batches(8)}),
    "a dataset of unknown batch size": (classifier, PLAIN, {"x": batches(8, known=False)}),
    "a dataset, steps per epoch": (classifier, PLAIN, {"x": batches(8).repeat(), "steps_per_epoch": 4}),
    "a sequence": (classifier, PLAIN, {"x": Sequence(), "shuffle": False}),
    "a generator": (classifier, PLAIN, {"x": generator, "steps_per_epoch": 2}),
    "initial epoch": (classifier, PLAIN, {**ARRAYS, "initial_epoch": 1, "epochs": 3}),
    "several steps per execution": (classifier, {**PLAIN, "steps_per_execution": 2}, ARRAYS),
    "several outputs": (
        two_outputs,
        {
            "loss": {"kind": FROM_LOGITS, "size": "mae"},
            "loss_weights": {"kind": 1.0, "size": 0.2},
            "metrics": {"kind": ["accuracy"], "size": ["mse", "mae"]},
        },
        BOTH,
    ),
    "one loss of two": (two_outputs, {"loss": [None, "mse"]}, {**BOTH, "y": [CLASSES, NUMBERS]}),
    "a sum as the loss": (
        two_outputs,
        {"loss": [FROM_LOGITS, tf_keras.losses.MeanSquaredError(reduction="sum")]},
        {**BOTH, "y": [CLASSES, NUMBERS]},
    ),
    "a loss function of the user's": (
        classifier,
        {"loss": lambda y, p: tf.reduce_mean((p - tf.cast(y, tf.float32)) ** 2, axis=-1)},
        {**ARRAYS, "y": CLASSES[:, None]},
    ),
    "losses of layers": (with_losses, PLAIN, ARRAYS),
    "metrics with a state": (
        classifier,
        {
            "loss": tf_keras.losses.CategoricalCrossentropy(from_logits=True),
            "metrics": [
                Meter, tf_keras.metrics.TopKCategoricalAccuracy, lambda: tf_keras.metrics.MeanIoU(3, sparse_y_true=False),
                tf_keras.metrics.CategoricalAccuracy,
            ],
        },
        {**ARRAYS, "y": np.eye(3, dtype=np.float32)[CLASSES]},
    ),
}  # fmt: skip


def compiled(model: Any, options: Mapping[str, Any], optimizer: Any = None) -> Any:
    given = dict(options)
    given["metrics"] = tf.nest.map_structure(
        lambda m: m() if isinstance(m, type) or callable(m) else m, given.get("metrics", [])
    )
    model.compile(optimizer=optimizer or tf_keras.optimizers.SGD(0.05, momentum=0.9), **given)
    return model


def fitted(model: Any, given: Mapping[str, Any]) -> dict[str, list[float]]:
    given = {"epochs": 2, "verbose": 0, **given}
    if "validation_split" not in given and "shuffle" not in given:
        given["shuffle"] = False
    if callable(given["x"]):
        given["x"] = given["x"]()
    history: dict[str, list[float]] = model.fit(**given).history
    return history


def compare(build: Callable[[], Any], options: Mapping[str, Any], given: Mapping[str, Any], **how: Any) -> None:
    """Trains a model plainly and distributed, from the same weights, and compares all there is to see."""
    plain = build()
    split = smp.DistributedModel(build)
    split.set_weights(plain.get_weights())
    make = how.get("optimizer", lambda: None)
    compiled(plain, options, make())
    compiled(split, options, make())
    tf.random.set_seed(11)
    expected = fitted(plain, given)
    tf.random.set_seed(11)
    found = fitted(split, given)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    for weight, same in zip(split.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, same, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(tf.nest.flatten(split.predict(X, verbose=0)), tf.nest.flatten(plain.predict(X, verbose=0)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_history_is_that_of_plain_keras(init: Callable[..., None], case: str) -> None:
    init(microbatches=3)
    compare(*CASES[case])


@pytest.mark.parametrize("case", ["validation data", "several outputs"])
def test_so_it_is_without_microbatches(init: Callable[..., None], case: str) -> None:
    init(microbatches=1)
    compare(*CASES[case])

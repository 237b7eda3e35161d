"""Layers that are frozen, and thawed later: what Keras says about `trainable` holds for a split model too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from tests.full_only import params

pytestmark = pytest.mark.large

X = np.arange(24, dtype=np.float32).reshape(8, 3) / 10.0
Y = np.ones((8, 2), np.float32)


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=2)


def functional() -> tf_keras.Model:
    inputs = layers.Input((3,))
    middle = layers.Dense(3, activation="tanh", name="middle")(layers.Dense(4, name="lower")(inputs))
    model = tf_keras.Model(inputs, layers.Dense(2, name="head")(middle))
    for name in ("lower", "middle"):
        model.get_layer(name).trainable = False
    return model


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.inner = functional()

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.inner(x)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "subclass": (Net, lambda model: model.inner),
    "builder": (lambda: smp.DistributedModel(functional), lambda model: model.wrapped),
    "wrapped": (lambda: smp.DistributedModel(functional()), lambda model: model.wrapped),
}


def layer_names(variables: Any) -> list[str]:
    return sorted({part for v in variables for part in v.name.split("/") if part in ("lower", "middle", "head")})


def changed(model: Any, before: list[np.ndarray]) -> list[str]:
    """The layers of which a weight is another than before; leaves what they are now in `before`."""
    now = [variable.numpy() for variable in model.variables]
    pairs = zip(model.variables, now, list(before) or now, strict=True)
    found = [variable for variable, new, old in pairs if (new != old).any()]
    before[:] = now
    return layer_names(found)


@pytest.mark.parametrize("kind", params(KINDS, ["builder"]))
def test_compiling_again_makes_what_was_thawed_count(kind: str) -> None:
    make, inner = KINDS[kind]
    model, values = make(), list[np.ndarray]()
    model.compile(tf_keras.optimizers.Adam(0.1), "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    changed(model, values)
    assert layer_names(model.optimizer.variables) == ["head"]
    model.fit(X, Y, batch_size=4, verbose=0)
    assert changed(model, values) == ["head"]

    inner(model).get_layer("middle").trainable = True
    model.compile(tf_keras.optimizers.Adam(0.1), "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    assert changed(model, values) == ["head", "middle"]
    assert layer_names(model.optimizer.variables) == ["head", "middle"]

    inner(model).get_layer("head").trainable = False
    model.compile(tf_keras.optimizers.Adam(0.1), "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    assert changed(model, values) == ["middle"]


@pytest.mark.parametrize("kind", params(KINDS, ["subclass", "wrapped"]))
def test_compiling_again_brings_another_optimizer_and_loss(kind: str) -> None:
    model, values = KINDS[kind][0](), list[np.ndarray]()
    model.compile(tf_keras.optimizers.SGD(0.1), "mse")
    first = model.fit(X, Y, batch_size=4, verbose=0).history["loss"]
    changed(model, values)
    model.compile(tf_keras.optimizers.SGD(0.0), lambda y_true, y_pred: tf.reduce_mean(0.0 * y_pred, -1) + 7.0)
    assert model.fit(X, Y, batch_size=4, verbose=0).history["loss"] == [7.0] != first
    assert model.evaluate(X, Y, batch_size=4, verbose=0) == 7.0
    assert changed(model, values) == []


def test_a_loop_of_ones_own_makes_its_step_anew() -> None:
    model, values = smp.DistributedModel(functional), list[np.ndarray]()
    slots = []

    def trainer() -> Callable[..., Any]:
        optimizer = tf_keras.optimizers.Adam(0.1)

        @smp.step
        def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        @tf.function
        def train(x: tf.Tensor, y: tf.Tensor) -> None:
            gradients = [gradient.accumulate() for gradient in forward_backward(x, y)]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        slots.append(optimizer)
        return train

    train = trainer()
    train(X, Y)
    changed(model, values)
    train(X, Y)
    assert changed(model, values) == ["head"]
    model.wrapped.get_layer("middle").trainable = True
    train = trainer()
    train(X, Y)
    assert changed(model, values) == ["head", "middle"]
    assert [layer_names(optimizer.variables) for optimizer in slots] == [["head"], ["head", "middle"]]

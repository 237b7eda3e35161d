"""Optimizers with code of their own between gradients and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tf_keras

from tests.distributed.siblings.script import Data, Keras, Script, trained


class Centralising(tf_keras.optimizers.SGD):
    """Centralises every gradient, and clips by the norm of all."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **more: Any) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        made = [g - tf.reduce_mean(g, 0, keepdims=True) if g is not None else None for g in gradients]
        made, _ = tf.clip_by_global_norm(made, 0.1)
        return super().apply_gradients(zip(made, variables, strict=True), *args, **more)


class Normalised(tf_keras.optimizers.SGD):
    """Steps of a length that no gradient changes."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **more: Any) -> Any:
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        norm = tf.linalg.global_norm([g for g, _ in pairs])
        return super().apply_gradients([(g / (norm + 1e-8), v) for g, v in pairs], *args, **more)


class ByLayer(tf_keras.optimizers.SGD):
    """Scales each gradient by its weight's norm (LARS)."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **more: Any) -> Any:
        made = []
        for gradient, variable in grads_and_vars:
            if gradient is not None:
                trust = tf.norm(variable) / (tf.norm(gradient) + 1e-6)
                made.append((gradient * tf.where(trust > 0.0, trust, tf.ones_like(trust)), variable))
        return super().apply_gradients(made, *args, **more)


class Lion(tf_keras.optimizers.Optimizer):
    """An optimizer from the ground up, with slots of its own and a norm for each weight."""

    def __init__(self, learning_rate: float = 0.01, name: str = "Lion", **more: Any) -> None:
        super().__init__(name=name, **more)
        self._learning_rate = self._build_learning_rate(learning_rate)

    def build(self, var_list: Any) -> None:
        super().build(var_list)
        if not getattr(self, "_built", False):
            self.momenta = [self.add_variable_from_reference(v, "momentum") for v in var_list]
            self._built = True

    def update_step(self, gradient: Any, variable: Any) -> None:
        momentum = self.momenta[self._index_dict[self._var_key(variable)]]
        rate = tf.cast(self.learning_rate, variable.dtype)
        update = tf.sign(0.9 * momentum + 0.1 * gradient)
        variable.assign_sub(rate * update * tf.minimum(tf.norm(gradient), 1.0))
        momentum.assign(0.99 * momentum + 0.01 * gradient)

    def get_config(self) -> Any:
        return {**super().get_config(), "learning_rate": self._serialize_hyperparameter(self._learning_rate)}


def trained_with(keras: Keras, optimizer: Any) -> Mapping[str, Any]:
    model = keras.net()
    model.compile(optimizer, "mse", metrics=["mae"])
    return trained(model, Data.X, Data.Y)


def centralising(keras: Keras) -> Mapping[str, Any]:
    return trained_with(keras, Centralising(0.2))


def normalised(keras: Keras) -> Mapping[str, Any]:
    return trained_with(keras, Normalised(0.05, momentum=0.9))


def by_layer(keras: Keras) -> Mapping[str, Any]:
    return trained_with(keras, ByLayer(0.02))


def lion(keras: Keras) -> Mapping[str, Any]:
    return trained_with(keras, Lion(0.01))


def of_an_instance(keras: Keras) -> Mapping[str, Any]:
    """The method of one optimizer is replaced, as answers to questions propose."""
    optimizer = tf_keras.optimizers.Adam(0.01)
    inner = optimizer.apply_gradients

    def clipped(grads_and_vars: Any, *args: Any, **more: Any) -> Any:
        pairs = list(grads_and_vars)
        gradients, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.1)
        return inner(zip(gradients, [v for _, v in pairs], strict=True), *args, **more)

    optimizer.apply_gradients = clipped
    return trained_with(keras, optimizer)


SIBLINGS: dict[str, Script] = {
    script.__name__: script for script in (centralising, normalised, by_layer, lion, of_an_instance)
}

"""Optimizers with a method of the script's own, in every form; made when a test asks for them, so after its model."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras


def bent(pairs: Iterable[Any]) -> list[Any]:
    """Gradients made larger, and large ones less so: of a sum it is not the sum, twice it is not once."""
    return [(2.0 * gradient / (1.0 + tf.abs(gradient)), variable) for gradient, variable in pairs]


def of_class(base: Any, *args: Any, mixed: bool = False) -> Any:
    """Of a class that is made now; or of one that has it from a class that is no optimizer."""

    class Bending:
        def apply_gradients(self, grads_and_vars: Any, *further: Any, **named: Any) -> Any:
            return super().apply_gradients(bent(grads_and_vars), *further, **named)  # type: ignore[misc]

    if mixed:
        return type("Mixed", (Bending, base), {})(*args)

    class Bent(base):  # type: ignore[misc]
        def apply_gradients(self, grads_and_vars: Any, *further: Any, **named: Any) -> Any:
            return super().apply_gradients(bent(grads_and_vars), *further, **named)

    return Bent(*args)


def replaced(optimizer: Any) -> Any:
    """With another function in place of its method."""
    inner = optimizer.apply_gradients

    @functools.wraps(inner)
    def apply_gradients(pairs: Any, *further: Any, **named: Any) -> Any:
        return inner(bent(pairs), *further, **named)

    optimizer.apply_gradients = apply_gradients
    return optimizer


def rebound(optimizer: Any) -> Any:
    """With another method, which calls that of the class."""
    kind = type(optimizer)

    def apply_gradients(self: Any, pairs: Any, *further: Any, **named: Any) -> Any:
        return kind.apply_gradients(self, bent(pairs), *further, **named)

    optimizer.apply_gradients = types.MethodType(apply_gradients, optimizer)
    return optimizer


def wrapping(inner: Any) -> Any:
    """An optimizer that hands its gradients to another one."""

    class Wrapping(tf_keras.optimizers.Optimizer):
        def __init__(self) -> None:
            super().__init__("wrapping")
            self.inner, self._learning_rate = inner, 1.0

        def apply_gradients(self, grads_and_vars: Any, **named: Any) -> Any:
            return self.inner.apply_gradients(bent(grads_and_vars))

    return Wrapping()


def branching() -> Any:
    """Decides by what it is given, as AutoGraph makes it possible."""

    class Branching(tf_keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any, **named: Any) -> Any:
            pairs = list(grads_and_vars)
            if tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient, _ in pairs]):
                factor = 0.5
            else:
                factor = 0.0
            return super().apply_gradients([(g * factor, v) for g, v in pairs], **named)

    return Branching(0.2)


def accumulating() -> Any:
    """Keeps slots of its own, one for each variable that it is built for."""

    class Accumulating(tf_keras.optimizers.SGD):
        def build(self, var_list: Any) -> None:
            super().build(var_list)
            if not hasattr(self, "sums"):
                self.sums = [self.add_variable_from_reference(v, "sum") for v in var_list]

        def apply_gradients(self, grads_and_vars: Any, **named: Any) -> Any:
            pairs = list(grads_and_vars)
            with tf.init_scope():
                self.build([variable for _, variable in pairs])
            sums = [self.sums[self._index_dict[self._var_key(variable)]] for _, variable in pairs]
            for (gradient, _), total in zip(pairs, sums, strict=True):
                total.assign(0.9 * total + gradient)
            return super().apply_gradients([(s + 0.0, v) for s, (_, v) in zip(sums, pairs, strict=True)], **named)

    return Accumulating(0.1)


SGD, LEGACY = tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD
scaled = tf_keras.mixed_precision.LossScaleOptimizer

FORMS: dict[str, Callable[[], Any]] = {
    "class": lambda: of_class(SGD, 0.1),
    "legacy, from a class that is no optimizer": lambda: of_class(LEGACY, 0.1, mixed=True),
    "replaced": lambda: replaced(tf_keras.optimizers.Adam(0.01)),
    "legacy, replaced": lambda: replaced(LEGACY(0.1)),
    "rebound": lambda: rebound(SGD(0.1)),
    "replaced twice": lambda: replaced(replaced(SGD(0.1))),
    "scaled, of a class": lambda: scaled(of_class(SGD, 0.1)),
    "scaled, replaced within": lambda: scaled(replaced(SGD(0.1)), dynamic=False, initial_scale=8.0),
    "scaled, replaced": lambda: replaced(scaled(SGD(0.1))),
    "legacy, scaled, of a class": lambda: scaled(of_class(LEGACY, 0.1)),
    "wrapping": lambda: wrapping(SGD(0.1)),
    "branching": branching,
    "accumulating": accumulating,
}
#: Those that differ most.
FEW = ("replaced", "scaled, of a class", "legacy, from a class that is no optimizer")


def build() -> tf_keras.Model:
    """Two layers, which two partitions share."""
    first = tf_keras.layers.Dense(3, activation="tanh", input_shape=(4,))
    return tf_keras.Sequential([first, tf_keras.layers.Dense(2)])


def difference(form: str, split: Any) -> float:
    """By how much weights that a distributed model is trained to differ from those of plain Keras.

    Args:
        form: of the optimizer.
        split: the model, as `build` makes it.
    """
    x, y = np.sin(np.arange(32.0)).reshape(8, 4), 10.0 * np.cos(np.arange(16.0)).reshape(8, 2)
    plain = build()
    split.set_weights(plain.get_weights())
    for model in (plain, split):
        model.compile(FORMS[form](), "mse")
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    pairs = zip(plain.get_weights(), split.get_weights(), strict=True)
    return max(float(np.max(np.abs(ours - theirs))) for ours, theirs in pairs)

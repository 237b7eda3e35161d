"""What the scripts share: plain Keras or smp_tf in its place, data, and a training whose numbers are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp

#: Trains a model and returns its numbers.
Script = Callable[["Keras"], Mapping[str, Any]]


class Data:
    """What is trained on: 44 samples, which are two batches of 21 and a last one of 2."""

    RANDOM = np.random.RandomState(7)
    X = RANDOM.randn(44, 6)
    Y = RANDOM.randn(44, 3)
    CLASSES = RANDOM.randint(0, 4, 44)
    #: Sequences of words, what is to be said in place of some of them, and -100 elsewhere.
    WORDS = RANDOM.randint(0, 11, (44, 7))
    MASKED = np.where(RANDOM.rand(44, 7) < 0.25, RANDOM.randint(0, 11, (44, 7)), -100)
    LENGTHS = RANDOM.randint(0, 8, 44)
    PLACES = RANDOM.randn(44, 3, 2)
    WEIGHTS = np.where(RANDOM.rand(44) < 0.3, 0.0, RANDOM.rand(44))


class Keras:
    """What a script is written with.

    Args:
        base: the class that models are derived from.
    """

    def __init__(self, base: type) -> None:
        self.base: Any = base

    def wrap(self, build: Callable[[], Any]) -> Any:
        """Returns the model that a function builds, split where models are."""
        return build() if self.base is tf_keras.Model else smp.DistributedModel(build)

    def net(self, outputs: int = 3, features: int = 6) -> Any:
        """Returns four layers, as many as there are pieces of a model at most."""
        return self.wrap(
            lambda: tf_keras.Sequential(
                [
                    layers.Dense(8, activation="tanh", input_shape=(features,)),
                    layers.Dense(7, activation="tanh"),
                    layers.Dense(5),
                    layers.Dense(outputs),
                ]
            )
        )

    def own(self, outputs: int = 3) -> type:
        """Returns a class of models of four layers, whose `train_step` a script writes."""

        class Own(self.base):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__(name="own")
                drawn = [tf_keras.initializers.RandomNormal(0.0, 0.3, seed) for seed in range(4)]
                self.first = layers.Dense(8, activation="tanh", kernel_initializer=drawn[0])
                self.second = layers.Dense(7, activation="tanh", kernel_initializer=drawn[1])
                self.third = layers.Dense(5, kernel_initializer=drawn[2])
                self.last = layers.Dense(outputs, kernel_initializer=drawn[3])

            def call(self, x: Any) -> Any:
                return self.last(self.third(self.second(self.first(x))))

        return Own


def trained(
    model: Any, x: Any, y: Any, *, shape: Any = (None, 6), evaluates: bool = False, **fit: Any
) -> Mapping[str, Any]:
    """Trains a compiled model from weights that are the same every time, and returns all that can be seen of it.

    A model whose own `call` adds losses or metrics is not built before, in plain Keras either: `shape` is None then.
    """
    if not model.built and shape is not None:
        model.build(shape)
    random = np.random.RandomState(1)
    for weight in model.trainable_variables if shape is not None else ():
        weight.assign(0.3 * random.randn(*weight.shape))
    given = {"epochs": 2, "shuffle": False, "verbose": 0, **fit}
    if smp.dp_size() > 1:
        history = _by_replicas(model, {"x": x, "y": y, **given})
    else:
        history = model.fit(x, y, batch_size=21, **given).history
    found = {name: np.asarray(values) for name, values in history.items()}
    values = zip(model.weights, model.get_weights(), strict=True)
    found.update({f"weight {n}": value for n, (weight, value) in enumerate(values) if weight.trainable})
    if evaluates and smp.dp_size() == 1:
        found["evaluated"] = np.asarray(model.evaluate(x, y, batch_size=15, verbose=0))
    return found


def _by_replicas(model: Any, given: dict[str, Any]) -> Mapping[str, Any]:
    """Trains on batches of 20; returns what is logged. Each replica has its part of a batch, and plain Keras all of it.

    The last batch is of 4 samples.
    """
    replicas = smp.dp_size() if isinstance(model, smp.DistributedModel) else 1
    places = [np.array_split(np.arange(first, min(first + 20, 44)), smp.dp_size()) for first in (0, 20, 40)]
    own = np.concatenate([np.concatenate(part) if replicas == 1 else part[smp.dp_rank()] for part in places])
    for name in ("x", "y", "sample_weight"):
        if name in given:
            given[name] = tf.nest.map_structure(lambda values: values[own], given[name])
    return dict(model.fit(**given, batch_size=20 // replicas).history)

"""Trains a model whose first two layers take long, with and without having measured it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import StepError
from smp_tf.model import profiling
from smp_tf.pipeline.planner.units import units_of

X = np.random.default_rng(5).normal(size=(8, 6)).astype(np.float32)


class Repeats(layers.Layer):
    """Takes long, which the sizes of its operations do not say."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight("kernel", (6, 6))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        times = tf.cast(tf.size(x) * 0 + 600, tf.int32)
        return tf.while_loop(lambda i, y: i < times, lambda i, y: (i + 1, tf.tanh(y @ self.kernel)), (0, x))[1]


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.slow = [Repeats(name=f"slow{number}") for number in range(2)]
        self.blocks = [layers.Dense(256, name=f"block{number}") for number in range(3)]
        self.drop = layers.Dropout(0.5, name="drop")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        for layer in (*self.slow, *self.blocks):
            x = layer(x)
        return self.drop(x, training=training)


def noting(ran: list[str]) -> Any:
    """As a unit is made ready, with its name noted."""
    original = profiling.make_ready

    def ready(cut: Any, unit: int, around: Any) -> Any:
        ran.append(units_of(cut.graph)[unit].name)
        return original(cut, unit, around)

    return ready


def train(profiled: bool, folder: str = "off", damage: bool = False) -> dict[str, Any]:
    """Three steps.

    Args:
        profiled: measure the model first, with another number of samples.
        folder: where profiles are kept.
        damage: what is kept there is damaged before.
    """
    model, optimizer = Net(), tf.keras.optimizers.SGD(0.1)
    ran: list[str] = []
    with mock.patch.dict(os.environ, SMP_TF_PROFILES=folder), mock.patch.object(profiling, "make_ready", noting(ran)):
        if damage and smp.rank() == 0:
            [kept] = Path(folder).iterdir()
            kept.write_text(kept.read_text()[:-9])
        if profiled:
            model.profile(X[:4])
    times = {name: list(pair) for name, pair in sorted(model._smp_store.measured.items())}

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    losses = []
    for _ in range(3):
        gradients, loss = step(X)
        sums = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))
        losses.append(float(loss.reduce_mean()))
    too_late = ""
    try:
        model.profile(X[:4])
    except StepError as error:
        too_late = str(error)
    names = sorted({variable.name.split("/")[-2] for variable in model.local_variables})
    alone = list(model._smp_store.alone)
    return {"losses": losses, "layers": names, "too_late": too_late, "ran": ran, "times": times, "alone": alone}

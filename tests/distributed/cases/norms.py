"""Norms over the gradients of all stages, in all the places where a script may ask for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp

ROWS = 8


class Net(smp.DistributedModel):
    """Dense layers with fixed weights, after an embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        start = tf_keras.initializers.RandomNormal(seed=7)
        self.table = layers.Embedding(11, 6, embeddings_initializer=start)
        self.hidden = [layers.Dense(6, activation="tanh", kernel_initializer=start) for _ in range(4)]

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        x = tf.reduce_mean(self.table(tokens), axis=1)
        for layer in self.hidden:
            x = layer(x)
        return x


def batch() -> tf.Tensor:
    return tf.constant(np.arange(ROWS * 3).reshape(ROWS, 3) % 11)


class Setting:
    """A model, the script's own weight, and a step over both."""

    def __init__(self) -> None:
        self.net = Net()
        self.scale = tf.Variable(np.full([6], 2.0, tf_keras.backend.floatx()), name="scale")

        @smp.step
        def step(tokens: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.scale * self.net(tokens) + 1.0) ** 2)
            return tape.gradient(loss, self.weights())

        self.step = step

    def weights(self) -> list[tf.Variable]:
        return [*self.net.trainable_variables, self.scale]

    def gradients(self) -> list[Any]:
        return [gradient.accumulate() for gradient in self.step(batch())]


def norms(eager: bool) -> dict[str, Any]:
    """What each way to ask for the norm says, and what clipping by it leaves on this rank."""
    setting = Setting()
    first = tf.linalg.global_norm

    def ask() -> dict[str, Any]:
        gradients = setting.gradients()
        clipped, norm = smp.clip_by_global_norm(gradients, 0.5)
        plainly, same = tf.clip_by_global_norm(gradients, 0.5)
        halves = [None if g is None else tf.math.scalar_mul(0.5, g) for g in gradients]
        return {
            "norm": smp.global_norm(gradients),
            "of halves": smp.global_norm(halves),
            "tf": tf.linalg.global_norm(gradients),
            "tf of halves": first(halves),
            "clip": norm,
            "tf clip": same,
            "given": smp.clip_by_global_norm(gradients, 1.0, use_norm=tf.constant(4.0, norm.dtype))[1],
            "clipped": {str(i): tf.convert_to_tensor(g) for i, g in enumerate(clipped) if g is not None},
            "plainly": {str(i): tf.convert_to_tensor(g) for i, g in enumerate(plainly) if g is not None},
            "sparse": [isinstance(g, tf.IndexedSlices) for g in clipped],
            "others": tf.linalg.global_norm([tf.constant([3.0, 4.0])]),
            "outputs": smp.global_norm(setting.step(batch())),
        }

    run: Callable[[], dict[str, Any]] = ask if eager else tf.function(ask)
    run()
    return {**run(), "rank": smp.mp_rank()}


def norms_in_float64(eager: bool) -> dict[str, Any]:
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
    return norms(eager)


def optimizers(kind: str, optimizer: str, scaled: bool = False) -> dict[str, Any]:
    """Three steps of an optimizer that clips by the norm of all gradients.

    Args:
        kind: "optimizers" or "legacy".
        optimizer: its class.
        scaled: within a loss-scale optimizer, whose second step has a gradient that is not finite.
    """
    setting = Setting()
    module = tf_keras.optimizers if kind == "optimizers" else tf_keras.optimizers.legacy
    inner = getattr(module, optimizer)(0.1, global_clipnorm=0.5)
    outer = inner
    if scaled:
        outer = tf_keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)
    poison = tf.Variable(1.0, trainable=False, dtype=tf_keras.backend.floatx())

    @smp.step
    def step(tokens: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((setting.scale * setting.net(tokens) + 1.0) ** 2)
            if scaled:
                loss = outer.get_scaled_loss(loss)
        gradients = tape.gradient(loss, setting.weights())
        # Only the gradient of the last layer's weights, which one rank has.
        return [*gradients[:-3], gradients[-3] * poison, *gradients[-2:]]

    @tf.function
    def train() -> None:
        gradients = [g.accumulate() for g in step(batch())]
        if scaled:
            gradients = outer.get_unscaled_gradients(gradients)
        outer.apply_gradients(zip(gradients, setting.weights(), strict=True))

    scales = []
    for factor in (1.0, np.inf if scaled else 1.0, 1.0):
        poison.assign(factor)
        train()
        if scaled:
            scales.append(float(outer.loss_scale))
    positions = {id(v): n for n, v in enumerate(setting.weights())}
    own = [*setting.net.local_trainable_variables, setting.scale]
    return {
        "weights": {str(positions[id(v)]): v.numpy() for v in own},
        "iterations": int(outer.iterations),
        "scales": scales,
    }


def nothing_of_its_own() -> dict[str, Any]:
    """Only the first layer trains: the last rank has no gradient at all, and takes part all the same."""
    setting = Setting()

    @smp.step
    def step(tokens: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((setting.net(tokens) + 1.0) ** 2)
        return tape.gradient(loss, setting.net.table.trainable_variables)

    def train(optimizer: Any) -> dict[str, Any]:
        @tf.function
        def run() -> tf.Tensor:
            gradients = [g.accumulate() for g in step(batch())]
            optimizer.apply_gradients(zip(gradients, setting.net.table.trainable_variables, strict=True))
            return tf.linalg.global_norm(gradients)

        return {"norm": run(), "iterations": int(optimizer.iterations)}

    inner = tf_keras.optimizers.SGD(0.1, global_clipnorm=0.5)
    return {
        "plain": train(tf_keras.optimizers.SGD(0.1, global_clipnorm=0.5)),
        "scaled": train(tf_keras.mixed_precision.LossScaleOptimizer(inner)),
    }


def filtered_list() -> dict[str, Any]:
    """A list from which this rank has left out what it does not have."""
    setting = Setting()
    gradients = [g for g in setting.gradients() if g is not None]
    smp.global_norm(gradients)
    return {}

"""Trains for some steps, records them, and leaves the timeline's file of this rank in a folder."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf import recording, runtime


def dense_net(width: int) -> tf_keras.Model:
    hidden = [layers.Dense(width, activation="relu", name=f"d{number}") for number in range(4)]
    return tf_keras.Sequential([tf_keras.Input((width,)), *hidden], name="net")


def recorded(folder: str, width: int, batch: int, count: int, steps: list[int] | None) -> dict[str, Any]:
    """Trains in a loop of its own.

    Args:
        folder: for the file.
        width: of the layers.
        batch: samples of a batch.
        count: steps to run within the recording.
        steps: which of them are recorded.

    Returns:
        Losses, and how long the recorded loop took.
    """
    model = smp.DistributedModel(lambda: dense_net(width))
    optimizer = tf_keras.optimizers.SGD(1e-3)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - x) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def train(x: tf.Tensor) -> tf.Tensor:
        loss, gradients = step(x)
        optimizer.apply_gradients(zip([g.accumulate() for g in gradients], model.trainable_variables, strict=True))
        return loss.reduce_mean()

    x = tf.constant(np.random.RandomState(0).randn(batch, width).astype(np.float32))
    losses = [float(train(x)) for _ in range(2)]
    smp.barrier()
    began = time.monotonic_ns()
    with smp.timeline(folder, steps=None if steps is None else tuple(steps)):
        losses += [float(train(x)) for _ in range(count)]
    ended = time.monotonic_ns()
    losses.append(float(train(x)))
    return {"losses": losses, "began": began, "ended": ended}


def fitted(steps: dict[str, list[int]], **options: Any) -> dict[str, Any]:
    """Trains a model with `fit` for two epochs of six batches, again and again from the same weights.

    Args:
        steps: which batches are recorded, by the folder for the file.
        **options: more arguments of `compile`.
    """
    model = smp.DistributedModel(lambda: dense_net(8))
    model.compile("sgd", "mse", **options)
    random = np.random.RandomState(0)
    x = random.randn(48, 8).astype(np.float32)
    weights = [random.randn(*weight.shape).astype(np.float32) for weight in model.weights]
    losses = []
    for folder, recorded_steps in steps.items():
        model.set_weights(weights)
        timeline = smp.callbacks.Timeline(steps=tuple(recorded_steps), path=folder)
        history = model.fit(x, x, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[timeline])
        losses.append(history.history["loss"])
    return {"losses": losses}


def clock_offset() -> dict[str, Any]:
    """How far the clock of rank 0 is ahead, which it cannot be told to be within a host, and what it takes to ask."""
    transport = runtime.current().transport
    assert transport is not None
    asked = time.monotonic_ns()
    answered = recording._time_of(transport)
    told = time.monotonic_ns()
    return {"offset": recording.ahead_of_this(transport), "times": [asked, answered, told]}

"""Trains for some steps, records them, and leaves the timeline's file of this rank in a folder."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.job import runtime
from smp_tf.recording import record as recording


def dense_net(width: int) -> tf_keras.Model:
    hidden = [layers.Dense(width, activation="relu", name=f"d{number}") for number in range(4)]
    return tf_keras.Sequential([tf_keras.Input((width,)), *hidden], name="net")


def tied_net(width: int) -> tf_keras.Model:
    """A net whose outputs are multiplied by the kernel of its first layer."""
    hidden = [layers.Dense(width, activation="tanh", name=f"d{number}") for number in range(4)]
    x = inputs = tf_keras.Input((width,))
    for layer in hidden:
        x = layer(x)
    return tf_keras.Model(inputs, tf.matmul(x, hidden[0].kernel, transpose_b=True), name="net")


def recorded(
    folder: str, width: int, batch: int, count: int, steps: list[int] | None, tied: bool = False
) -> dict[str, Any]:
    """Trains in a loop of its own.

    Args:
        folder: for the file.
        width: of the layers.
        batch: samples of a batch.
        count: steps to run within the recording.
        steps: which of them are recorded.
        tied: whether the last stage uses a kernel that the first one stores.

    Returns:
        Losses, how long the recorded loop took, and what the changes of weights wait for.
    """
    model = smp.DistributedModel(lambda: tied_net(width) if tied else dense_net(width))
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
    return {"losses": losses, "began": began, "ended": ended, "waits": waits_of_changes(train, x, model)}


def waits_of_changes(train: Any, x: tf.Tensor, model: Any) -> dict[str, list[str]]:
    """By the name of each weight of this rank, the averages over replicas that its change waits for."""
    graph = train.get_concrete_function(x).graph
    inside = {id(outer): inner.name for outer, inner in graph.captures}
    stored = {inside[id(v.handle)]: v.name for v in model.local_variables if id(v.handle) in inside}
    found = {}
    for operation in graph.get_operations():
        if operation.type.startswith("Assign") and operation.inputs[0].name in stored:
            seen = {operation}
            stack = [operation]
            while stack:
                last = stack.pop()
                before = {*(tensor.op for tensor in last.inputs), *last.control_inputs} - seen
                seen |= before
                stack += before
            averages = sorted(op.name for op in seen if op.type.startswith("Horovod"))
            found[stored[operation.inputs[0].name]] = averages
    return found


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

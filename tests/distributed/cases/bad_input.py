"""Mistakes a script can make: each case makes one and returns the error it got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tf_keras import layers

import smp_tf as smp

TWO = {"partitions": 2, "microbatches": 4}


class Net(smp.DistributedModel):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.hidden = [layers.Dense(8, activation="tanh") for _ in range(depth)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.hidden:
            x = layer(x)
        return x


def error_of(act: Callable[[], Any]) -> dict[str, Any]:
    """Returns the type, the built-in bases and the words of what the call raises."""
    try:
        act()
    except Exception as error:
        bases = [base.__name__ for base in type(error).__mro__]
        return {"type": type(error).__name__, "bases": bases, "words": str(error)}
    finally:
        if smp.is_initialized():
            smp.shutdown()
    return {"type": None, "bases": [], "words": "no error"}


def features(samples: int = 16) -> tf.Tensor:
    return tf.constant(np.ones((samples, 8), np.float32))


def training_step(net: smp.DistributedModel) -> Any:
    @smp.step
    def train(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(x) ** 2)
        return loss, tape.gradient(loss, net.trainable_variables)

    return train


def first_batch_too_small() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)
        training_step(Net())(features(3))

    return error_of(act)


def more_partitions_than_layers() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)
        training_step(Net(depth=1))(features())

    return error_of(act)


def partitions_do_not_divide_the_world() -> dict[str, Any]:
    return error_of(lambda: smp.init({"partitions": 3}))


def model_called_outside_a_step() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)
        Net()(features())

    return error_of(act)


def step_that_ignores_the_model() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)
        net = Net()

        @smp.step
        def step(x: tf.Tensor) -> tf.Tensor:
            net(x)
            return tf.reduce_sum(x)

        step(features())

    return error_of(act)


def step_without_a_model() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)

        @smp.step
        def step(x: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(x)

        step(features())

    return error_of(act)


def step_that_returns_nothing() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)
        net = Net()

        @smp.step
        def step(x: tf.Tensor) -> None:
            net(x)

        step(features())

    return error_of(act)


def argument_that_cannot_be_split() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)
        net = Net()

        @smp.step(input_split_axes={"x": 2})
        def step(x: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(net(x))

        step(features())

    return error_of(act)


def scalar_argument() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)
        net = Net()

        @smp.step
        def step(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(net(x)) * scale

        step(features(), tf.constant(2.0))

    return error_of(act)


def arguments_of_different_batch_size() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)
        net = Net()

        @smp.step
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(net(x)) + tf.reduce_sum(y)

        step(features(16), features(12))

    return error_of(act)


def tape_outside_the_step() -> dict[str, Any]:
    def act() -> None:
        smp.init(TWO)
        net = Net()

        @smp.step
        def step(x: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(net(x) ** 2)

        with tf.GradientTape() as tape:
            loss = step(features()).reduce_mean()
        tape.gradient(loss, net.trainable_variables)

    return error_of(act)


def unknown_key() -> dict[str, Any]:
    return error_of(lambda: smp.init({"partitons": 2}))


def wrong_type() -> dict[str, Any]:
    return error_of(lambda: smp.init({"microbatches": "four"}))


def not_initialised() -> dict[str, Any]:
    return error_of(lambda: Net())

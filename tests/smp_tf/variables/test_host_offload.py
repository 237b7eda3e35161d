"""What is offloaded to the host in one process; that it leaves a device is tested with two (tests/distributed)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import StepError

pytestmark = pytest.mark.usefixtures("keras_defaults")


class Training:
    """A model, its optimizer, and a step of both."""

    def __init__(self, optimizer: Any) -> None:
        start = tf_keras.initializers.RandomNormal(seed=3)
        self.net = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Dense(3, kernel_initializer=start)]))
        self.optimizer = optimizer

        @smp.step
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.net(x) - 1.0) ** 2)
            return tape.gradient(loss, self.net.trainable_variables)

        self._step = step

    def run(self, jit_compile: bool | None = None) -> list[np.ndarray]:
        """Two updates; the weights after them."""

        @tf.function(jit_compile=jit_compile)
        def apply(averages: Any) -> None:
            self.optimizer.apply_gradients(zip(averages, self.net.trainable_variables, strict=True))

        for seed in (1, 2):
            batch = tf.random.stateless_normal([6, 4], [seed, 0])
            apply([gradient.accumulate() for gradient in self._step(batch)])
        return [weight.numpy() for weight in self.net.trainable_variables]


@pytest.mark.parametrize("key", ["gradient_offload", "optimizer_offload"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_weights_are_the_same_with_and_without(init: Callable[..., None], key: str, microbatches: int) -> None:
    found = []
    for more in ({}, {key: True}):
        init(microbatches=microbatches, **more)
        found.append(Training(tf_keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=True)).run())
        smp.shutdown()
    for plain, offloaded in zip(*found, strict=True):
        np.testing.assert_allclose(offloaded, plain, rtol=1e-6)


def test_slots_stay_where_an_optimizer_has_them(init: Callable[..., None]) -> None:
    """After another start they were moved to the host and back at every step, and nothing said so."""
    for before, after, words in (
        ({}, {"optimizer_offload": True}, "where every replica has all slots; now every replica has all slots on the"),
        ({"optimizer_offload": True}, {}, "where every replica has all slots on the host; now every replica has all s"),
    ):
        init(microbatches=2, **before)
        training = Training(tf_keras.optimizers.Adam(0.1))
        training.run()
        smp.shutdown()
        init(microbatches=2, **after)
        with pytest.raises(StepError, match=words):
            training.run()
        smp.shutdown()


def test_an_update_that_xla_is_to_compile_is_an_error_in_words(init: Callable[..., None]) -> None:
    init(microbatches=2, optimizer_offload=True)
    with pytest.raises(StepError, match=r"jit_compile=True, and slots are on the host \(optimizer_offload\)"):
        Training(tf_keras.optimizers.Adam(0.1)).run(jit_compile=True)


def test_an_optimizer_is_as_the_user_made_it_after_an_update(
    init: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    init(microbatches=2, optimizer_offload=True)
    optimizer = tf_keras.optimizers.Adam(0.1)
    # As Keras has it where there is a GPU.
    optimizer.jit_compile = True
    Training(optimizer).run()
    assert optimizer.jit_compile is True
    assert capsys.readouterr().err.count("jit_compile of Adam") == 1


def test_optimizers_of_variables_that_no_model_has_are_left_alone(init: Callable[..., None]) -> None:
    init(microbatches=2, optimizer_offload=True)
    Training(tf_keras.optimizers.Adam(0.1)).run()
    variable, optimizer = tf.Variable([1.0, 2.0]), tf_keras.optimizers.legacy.Adam(0.1)
    optimizer.apply_gradients([(tf.ones([2]), variable)])
    np.testing.assert_allclose(variable, [0.9, 1.9], rtol=1e-5)


def test_a_step_that_xla_compiles_adds_nothing_up_on_the_host(init: Callable[..., None]) -> None:
    init(microbatches=2, gradient_offload=True)

    @smp.step(jit_compile=True)
    def step(x: tf.Tensor) -> Any:
        return tf.gradients(tf.reduce_sum(net(x)), net.trainable_variables)

    @smp.step(jit_compile=True)
    def evaluate(x: tf.Tensor) -> Any:
        return tf.reduce_sum(net(x))

    net = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Dense(3)]))
    # It adds nothing up.
    evaluate(tf.ones([4, 2]))
    with pytest.raises(StepError, match="has jit_compile=True, and gradient_offload adds gradients up on the host"):
        step(tf.ones([4, 2]))

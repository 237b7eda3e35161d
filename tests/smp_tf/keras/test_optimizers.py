"""What an optimizer is asked besides its slots: its schedule, its loss scale, its aggregator."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf.keras import optimizers

pytestmark = pytest.mark.usefixtures("keras_defaults")


def test_a_scheduled_rate_can_be_brought_up_to_date() -> None:
    halved = tf_keras.optimizers.schedules.ExponentialDecay(1.0, decay_steps=1, decay_rate=0.5)
    for optimizer in (tf_keras.optimizers.SGD(halved), tf_keras.optimizers.SGD(0.25)):
        optimizer.iterations.assign(2)
        optimizers.follow_schedule(optimizer)
        assert float(optimizer.learning_rate) == 0.25
    optimizers.follow_schedule(tf_keras.optimizers.legacy.SGD(0.25))


@pytest.mark.parametrize("module", [tf_keras.optimizers, tf_keras.optimizers.legacy])
def test_one_function_decides_for_every_loss_scale_optimizer(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def never(gradients: Any) -> tf.Tensor:
        asked.append(len(gradients))
        return tf.constant(False)

    monkeypatch.setattr(*optimizers.finiteness_check(), never)
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(module.SGD(1.0), initial_scale=8.0)
    weight = tf.Variable(1.0)
    optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert (float(weight), float(optimizer.loss_scale), asked) == (1.0, 4.0, [1])
    assert not optimizers.update_loss_scale(optimizer)
    assert (float(optimizer.loss_scale), asked) == (2.0, [1, 0])
    fixed = tf_keras.mixed_precision.LossScaleOptimizer(module.SGD(1.0), dynamic=False, initial_scale=8.0)
    assert optimizers.update_loss_scale(fixed) is True


def test_an_older_optimizer_that_is_given_nothing_has_the_usual_aggregator() -> None:
    usual = optimizers.usual_aggregator()
    assert tf_keras.optimizers.legacy.SGD(0.1).gradient_aggregator is usual
    assert tf_keras.optimizers.legacy.SGD(0.1, gradient_aggregator=list).gradient_aggregator is list

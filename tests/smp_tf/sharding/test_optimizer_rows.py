"""Which optimizers make of some rows of a weight what they make of them within the whole."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf.keras.optimizer_reports import in_use
from smp_tf.keras.optimizer_trials import updates_rows

_NEW, _LEGACY = tf_keras.optimizers, tf_keras.optimizers.legacy


class Trust(tf_keras.optimizers.SGD):
    """Goes by the norm of a weight."""

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        variable.assign_sub(self.learning_rate * gradient * tf.norm(variable) / tf.norm(gradient))


class ByRank(tf_keras.optimizers.SGD):
    """Goes by the rank of a weight, which rows have too."""

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        super().update_step(gradient * (1.0 if variable.shape.rank > 1 else 2.0), variable)


class Seldom(tf_keras.optimizers.SGD):
    """Changes nothing while it is tried out."""

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        variable.assign_sub(tf.where(self.iterations < 100, 0.0, gradient / tf.norm(gradient)))


class Sending(tf_keras.optimizers.SGD):
    """May wait for other ranks, which try nothing out."""

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nobody may call it")


class Unknown(tf_keras.optimizers.SGD):
    """Cannot be copied."""

    def get_config(self) -> Any:
        raise NotImplementedError


YES = {
    "adam": lambda: _NEW.Adam(1e-3),
    "amsgrad": lambda: _NEW.Adam(1e-3, amsgrad=True),
    "adamw": lambda: _NEW.AdamW(1e-3),
    "sgd": lambda: _NEW.SGD(1e-3),
    "nesterov": lambda: _NEW.SGD(1e-3, momentum=0.9, nesterov=True),
    "lion": lambda: _NEW.Lion(1e-4),
    "nadam": lambda: _NEW.Nadam(1e-3),
    "adamax": lambda: _NEW.Adamax(1e-3),
    "adadelta": lambda: _NEW.Adadelta(1e-3),
    "adagrad": lambda: _NEW.Adagrad(1e-3),
    "rmsprop": lambda: _NEW.RMSprop(1e-3, centered=True, momentum=0.5),
    "ftrl": lambda: _NEW.Ftrl(1e-3, l1_regularization_strength=0.1),
    "clipped values": lambda: _NEW.SGD(1e-3, clipvalue=0.5),
    "clipped by the norm of all": lambda: _NEW.SGD(1e-3, global_clipnorm=0.5),
    "averages": lambda: _NEW.SGD(1e-3, use_ema=True, ema_overwrite_frequency=2),
    "scaled": lambda: tf_keras.mixed_precision.LossScaleOptimizer(_NEW.Adam(1e-3)),
    "a schedule that begins with nothing": lambda: _NEW.Adam(
        tf_keras.optimizers.schedules.PolynomialDecay(0.0, 100, 1e-9)
    ),
    "legacy adam": lambda: _LEGACY.Adam(1e-3),
    "legacy sgd": lambda: _LEGACY.SGD(1e-3, momentum=0.9),
    "a script's, by rank": lambda: ByRank(1e-3),
}
NO = {
    "adafactor": lambda: _NEW.Adafactor(1e-9),
    "clipped": lambda: _NEW.Adam(1e-3, clipnorm=0.5),
    "signs of what is clipped": lambda: _NEW.Lion(1e-4, clipnorm=0.5),
    "legacy, clipped": lambda: _LEGACY.SGD(1e-3, clipnorm=0.5),
    "a script's, by norms": lambda: Trust(1e-3),
    "a script's, seldom": lambda: Seldom(1e-3),
    "a script's, that applies by itself": lambda: Sending(1e-3),
    "no copy": lambda: Unknown(1e-3),
}


@pytest.mark.parametrize("name", YES)
def test_one_that_goes_by_each_element_updates_rows(name: str) -> None:
    assert updates_rows(YES[name]())


@pytest.mark.parametrize("name", NO)
def test_one_that_looks_at_the_whole_does_not(name: str) -> None:
    assert not updates_rows(NO[name]())


def test_the_optimizer_stays_as_it_is_and_copies_are_not_in_use() -> None:
    before = in_use()
    optimizer = _NEW.Adam(1e-3)
    assert updates_rows(optimizer)
    assert updates_rows(optimizer)
    assert optimizer.variables == [optimizer.iterations]
    assert int(optimizer.iterations) == 0
    assert float(optimizer.learning_rate) == pytest.approx(1e-3)
    assert in_use() == before


def test_in_a_function_it_is_tried_out_at_once() -> None:
    optimizer = _NEW.Adam(1e-3)

    @tf.function
    def traced() -> tf.Tensor:
        return tf.constant(updates_rows(optimizer))

    assert traced().numpy()

"""An optimizer that averages what it is given, unless a step has averaged it or will."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.errors import StepError
from smp_tf.optimizer import distributed_optimizer
from smp_tf.partition.spread import EVERYWHERE
from smp_tf.replicas import gradient_marks


@pytest.fixture
def averaged(monkeypatch: pytest.MonkeyPatch, init: Callable[..., None]) -> list[list[bool]]:
    """For every call of the average, which of its gradients were averaged before; it doubles the others."""
    init(microbatches=2)
    calls: list[list[bool]] = []

    def average(gradients: list[Any]) -> list[Any]:
        calls.append([gradient_marks.mark_of(gradient).is_average for gradient in gradients])
        return [g if is_averaged else 2 * g for g, is_averaged in zip(gradients, calls[-1], strict=True)]

    monkeypatch.setattr(distributed_optimizer, "average_gradients", average)
    return calls


OPTIMIZERS = {
    "new": lambda: tf_keras.optimizers.SGD(1.0),
    "legacy": lambda: tf_keras.optimizers.legacy.SGD(1.0),
    "loss scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.SGD(1.0), dynamic=False, initial_scale=1.0
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_only_what_is_not_averaged_is(kind: str, averaged: list[list[bool]]) -> None:
    plain = OPTIMIZERS[kind]()
    optimizer = smp.DistributedOptimizer(plain)
    assert smp.DistributedOptimizer(optimizer) is optimizer is plain
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    optimizer.apply_gradients([(gradient_marks.mark(tf.constant(0.25), spread=EVERYWHERE), a), (tf.constant(0.25), b)])
    assert averaged == [[True, False]]
    assert (float(a), float(b)) == (0.75, 0.5)


def test_fit_averages_the_sums_alone(averaged: list[list[bool]]) -> None:
    """Once, in what fit traces for a microbatch, the average would have become a part of the step."""
    model = smp.DistributedModel(tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))]))
    model.compile(smp.DistributedOptimizer(tf_keras.optimizers.SGD(0.1)), "mse")
    before = model.get_weights()
    model.fit(np.ones([4, 2], np.float32), np.zeros([4, 1], np.float32), verbose=0)
    assert averaged == [[True, True]]
    assert not np.array_equal(before[0], model.get_weights()[0])


@pytest.mark.parametrize("given", [None, "adam", tf_keras.optimizers.SGD])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(StepError, match=r"takes an optimizer of tf_keras, such as .* Received"):
        smp.DistributedOptimizer(given)

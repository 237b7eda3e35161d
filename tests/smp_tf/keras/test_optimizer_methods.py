"""What a script's own `apply_gradients` makes of gradients is made once, of the averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.keras.optimizer_methods import is_of_keras
from smp_tf.optimizer.patch import OptimizerPatch
from tests.full_only import params
from tests.own_optimizers import FORMS, build, difference, of_class, replaced

pytestmark = pytest.mark.usefixtures("keras_defaults")


@pytest.mark.parametrize("form", params(FORMS, [form for form in FORMS if form != "replaced"]))
def test_the_weights_are_those_of_plain_keras(init: Callable[..., None], form: str) -> None:
    init(microbatches=2)
    assert difference(form, smp.DistributedModel(build)) < 1e-5


@pytest.fixture
def patch() -> Iterator[OptimizerPatch]:
    found = OptimizerPatch()
    found.install()
    yield found
    found.remove()


def test_a_class_of_before_and_one_of_later_are_met_alike(patch: OptimizerPatch) -> None:
    patch.remove()
    before = of_class(tf_keras.optimizers.SGD, 1.0)
    kept = before.apply_gradients
    patch.install()
    for optimizer in (before, of_class(tf_keras.optimizers.SGD, 1.0)):
        weight = tf.Variable(0.0)
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
        assert weight.numpy() == -1.0
        assert optimizer.apply_gradients.__func__.__module__.startswith("smp_tf.")
    patch.remove()
    assert before.apply_gradients == kept


@pytest.mark.parametrize("legacy", [False, True])
def test_a_wrapper_that_copies_the_names_of_keras_s_method_is_the_script_s(legacy: bool, patch: OptimizerPatch) -> None:
    optimizers: Any = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    optimizer = optimizers.SGD(1.0)
    assert is_of_keras(optimizer.apply_gradients)
    assert not is_of_keras(replaced(optimizer).apply_gradients)


@pytest.mark.full
def test_averaging_over_replicas_comes_before_a_class_of_the_script_s(init: Callable[..., None]) -> None:
    """`smp.DistributedOptimizer` kept the method of before the first model, and so went past what filters pairs."""
    optimizer = smp.DistributedOptimizer(of_class(tf_keras.optimizers.SGD, 1.0))
    init(microbatches=2)
    model = smp.DistributedModel(build)
    model.compile(optimizer, "mse")
    plain = build()
    model.set_weights(plain.get_weights())
    plain.compile(of_class(tf_keras.optimizers.SGD, 1.0), "mse")
    x, y = tf.ones([4, 4]), tf.ones([4, 2])
    for trained in (model, plain):
        trained.fit(x, y, verbose=0)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)

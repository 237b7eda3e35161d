"""What Keras does with compiled losses and metrics, and what compiling sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tf_keras
from tf_keras import layers

from smp_tf.keras import losses

pytestmark = pytest.mark.usefixtures("keras_defaults")


def test_a_compiled_model_reduces_its_losses_by_the_functions_that_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    container, functions = losses.compiled_losses()
    called = []

    def noted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return call

    watched = ((container, "__call__"), (functions, "apply_valid_mask"), (functions, "compute_weighted_loss"))
    for owner, name in watched:
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))])
    model.compile("sgd", "mse")
    model.test_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    assert called == ["__call__", "apply_valid_mask", "compute_weighted_loss"]


def test_compiling_sets_the_attributes_that_a_wrapped_model_hands_on() -> None:
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    assert not losses.is_compiled(model)
    before = dict(vars(model))
    model.compile("sgd", "mse", metrics=["mae"], jit_compile=True, run_eagerly=False, steps_per_execution=2)
    changed = {name for name, value in vars(model).items() if before.get(name, model) is not value}
    assert {name for name in changed if not name.startswith("_self_")} == set(losses.set_by_compile())
    assert losses.is_compiled(model)


def test_keras_asks_one_method_for_the_logs_of_an_epoch_and_of_an_evaluation() -> None:
    asked = []

    class Net(tf_keras.Sequential):
        def _validate_and_get_metrics_result(self, logs: Any) -> Any:
            asked.append(sorted(logs))
            return super()._validate_and_get_metrics_result(logs) | {"ours": 1.0}

    model = Net([layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(np.ones([4, 2]), np.ones([4, 1]), epochs=2, verbose=0)
    assert history.history["ours"] == [1.0, 1.0]
    assert model.evaluate(np.ones([4, 2]), np.ones([4, 1]), verbose=0, return_dict=True)["ours"] == 1.0
    assert asked == [["loss"]] * 3

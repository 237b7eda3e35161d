"""Scopes of `tf.distribute` are refused, whatever is begun in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.errors import StepError
from tests.full_only import params
from tests.own_optimizers import build

pytestmark = pytest.mark.usefixtures("keras_defaults")
STRATEGIES: dict[str, Callable[[], Any]] = {
    "MirroredStrategy": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
    "OneDeviceStrategy": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "CentralStorageStrategyV1": lambda: tf.compat.v1.distribute.experimental.CentralStorageStrategy(["CPU:0"]),
}


@pytest.mark.parametrize("name", params(STRATEGIES, [name for name in STRATEGIES if name != "MirroredStrategy"]))
def test_a_model_is_not_made_or_used_in_one(init: Callable[..., None], name: str) -> None:
    init()
    model = smp.DistributedModel(build)
    model.compile("sgd", "mse")
    x, y = np.ones((4, 4), np.float32), np.ones((4, 2), np.float32)

    class Net(smp.DistributedModel):
        pass

    @smp.step
    def forward(x: tf.Tensor) -> Any:
        return model(x)

    begun: dict[str, Callable[[], Any]] = {
        "A DistributedModel was made": lambda: smp.DistributedModel(build),
        "A Net was made": Net,
        "Model 'sequential' was compiled": lambda: model.compile("sgd", "mse"),
        "fit of model 'sequential' was called": lambda: model.fit(x, y),
        "evaluate of model 'sequential' was called": lambda: model.evaluate(x, y),
        "predict of model 'sequential' was called": lambda: model.predict(x),
        "Step 'train_step' was called": lambda: model.train_on_batch(x, y),
        "Step 'forward' was called": lambda: forward(tf.constant(x)),
    }
    tf_keras.backend.clear_session()
    with STRATEGIES[name]().scope():
        for words, begin in begun.items():
            pattern = f"^{words} in the scope of a strategy of tf.distribute, {name}.* Take the strategy out"
            with pytest.raises(StepError, match=pattern):
                begin()
    model.fit(x, y, verbose=0)

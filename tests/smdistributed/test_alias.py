"""The drop-in alias: the names of smp_tf, and what Keras optimizers of 2020 had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
import tf_keras

import smdistributed.modelparallel.tensorflow as smp
import smp_tf
from tests import quick_import
from tests.smp_tf.conftest import _reset_keras

pytestmark = pytest.mark.large

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def init() -> Iterator[Callable[..., None]]:
    _reset_keras()
    yield lambda **config: smp.init({"partitions": 1, "seed": 5, **config})
    smp.shutdown()
    _reset_keras()


def run(code: str, **environment: str) -> str:
    """What Python code prints in a fresh process, or its error's last line."""
    clean = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    done = subprocess.run(
        [sys.executable, "-c", quick_import.CODE + code],
        env={**clean, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_it_has_every_public_name() -> None:
    for name in smp_tf.__all__:
        if name != "init":
            assert getattr(smp, name) is getattr(smp_tf, name), name
    assert set(smp_tf.__all__) | {"core", "utils"} <= set(dir(smp))
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        smp.no_such_name  # noqa: B018


def test_core_has_ranks_and_barriers(init: Callable[..., None]) -> None:
    init()
    smp.core.barrier()
    told = (smp.core.rank(), smp.core.size(), smp.core.local_rank(), smp.core.mp_rank(), smp.core.dp_size())
    assert told == (0, 1, 0, 0, 1)
    assert smp.core.init is smp.init
    assert smp.core.__all__ == sorted(smp_tf.__all__)
    for name in smp.core.__all__:
        assert getattr(smp.core, name) is getattr(smp, name)


def test_importing_it_imports_no_tensorflow() -> None:
    code = "import sys, smdistributed.modelparallel.tensorflow as smp; print('tensorflow' in sys.modules)"
    assert run(code) == "False"


def test_tensorflow_first_without_the_variable_is_told_exactly_that() -> None:
    code = "import tensorflow\nimport smdistributed.modelparallel.tensorflow as smp"
    assert run(code) == (
        "smp_tf.errors.EnvironmentSetupError: This script imports TensorFlow before "
        "smdistributed.modelparallel.tensorflow, so its tf.keras is Keras 3. Run it with TF_USE_LEGACY_KERAS=1 in the "
        "environment: TF_USE_LEGACY_KERAS=1 horovodrun -np 2 python <script>"
    )
    assert run(code + "\nprint('fine')", TF_USE_LEGACY_KERAS="1") == "fine"


OPTIMIZERS = [
    tf_keras.optimizers.SGD,
    tf_keras.optimizers.Adam,
    tf_keras.optimizers.RMSprop,
    tf_keras.optimizers.Nadam,
    tf_keras.optimizers.legacy.Adam,
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_get_gradients_within_a_step(init: Callable[..., None], optimizer: type) -> None:
    init(microbatches=2)

    class Net(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.head = tf_keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.head(x)

    model, chosen = Net(), optimizer(lr=0.1)
    assert float(chosen.lr) == pytest.approx(0.1)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        loss, weights = tf.reduce_mean(model(x)), model.trainable_variables
        return chosen.get_gradients(loss, weights), tf.gradients(loss, weights), loss

    ours, tensorflows, _ = step(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]))
    assert [g.accumulate().numpy().tolist() for g in ours] == [[[4.0], [5.0]], [1.0]]
    assert [g.accumulate().numpy().tolist() for g in tensorflows] == [[[4.0], [5.0]], [1.0]]


def test_a_variable_without_a_gradient_is_named(init: Callable[..., None]) -> None:
    init()
    used, idle = tf.Variable(1.0, name="used"), tf.Variable(1.0, name="idle")
    optimizer = tf_keras.optimizers.SGD()

    @tf.function
    def gradients() -> Any:
        return optimizer.get_gradients(used * 2.0, [used, idle])

    with pytest.raises(ValueError, match="the loss does not depend on variable 'idle:0'"):
        gradients()


def test_decay_is_that_of_older_optimizers(init: Callable[..., None]) -> None:
    init()
    rates = []
    for made in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        for arguments in ({"learning_rate": 0.5}, {"lr": 0.5}):
            weight = tf.Variable(0.0)
            optimizer = made(**arguments, decay=0.1)
            for _ in range(3):
                optimizer.apply_gradients([(tf.constant(-1.0), weight)])
            rates.append(float(weight))
    assert rates == pytest.approx([0.5 + 0.5 / 1.1 + 0.5 / 1.2] * 4)
    assert float(tf_keras.optimizers.SGD(0.5, decay=0.0).learning_rate) == 0.5


def test_the_rate_that_older_scripts_print_is_that_of_the_next_step(init: Callable[..., None]) -> None:
    init()
    for made in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        optimizer = made(0.5, decay=0.1)
        optimizer.apply_gradients([(tf.constant(0.0), tf.Variable(0.0))])
        assert float(optimizer._decayed_lr(tf.float32)) == pytest.approx(0.5 / 1.1)
    assert f"{tf_keras.optimizers.SGD(0.5)._decayed_lr('float32'):.2f}" == "0.50"


def test_models_are_saved_as_older_scripts_say(init: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(smp.DistributedModel, "save_model", lambda model, path: saved.append(path))
    init()

    class Net(smp.DistributedModel):
        pass

    model = Net()
    model.save_model("a")
    model.save_model(save_path="b")
    model.save_model()
    assert saved == ["a", "b", "/opt/ml/model"]
    with pytest.raises(TypeError, match="was given path and save_path"):
        model.save_model("a", save_path="b")
    smp.shutdown()
    with pytest.raises(TypeError, match="save_path"):
        smp.DistributedModel.save_model(model, save_path="b")


def test_lr_beside_learning_rate_is_refused(init: Callable[..., None]) -> None:
    init()
    with pytest.raises(TypeError, match="Adam was given learning_rate and lr, its older name"):
        tf_keras.optimizers.Adam(0.1, lr=0.2)


def test_the_variables_of_an_optimizer_have_their_older_names(init: Callable[..., None]) -> None:
    init()
    optimizer = tf_keras.optimizers.SGD(0.5)
    assert [v.name for v in optimizer.variables()] == [v.name for v in optimizer.weights]
    assert [float(v) for v in optimizer.get_weights()] == [float(v) for v in optimizer.variables]


def test_shutdown_puts_keras_back(init: Callable[..., None]) -> None:
    before = tf_keras.optimizers.Adam.__init__
    init()
    assert tf_keras.optimizers.Adam.__init__ is not before
    smp.shutdown()
    assert tf_keras.optimizers.Adam.__init__ is before
    assert not hasattr(tf_keras.optimizers.Adam, "get_gradients")
    assert not hasattr(tf_keras.optimizers.Adam, "weights")

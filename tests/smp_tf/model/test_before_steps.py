"""What is saved or listed of a model before its first step: initial values, those of a checkpoint, those it was given.

The first step then does what it would have done. Several ranks are tried in tests/distributed/test_checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import StepError
from tests.full_only import params

X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
Y = X[:, :2] * 0.5


@pytest.fixture(autouse=True)
def _init(init: Callable[..., None]) -> None:
    init(microbatches=2)


def functional() -> tf_keras.Model:
    inputs = layers.Input((3,))
    hidden = layers.BatchNormalization(name="normal")(layers.Dense(4, activation="tanh", name="hidden")(inputs))
    return tf_keras.Model(inputs, layers.Dense(2, name="head")(hidden), name="net")


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.hidden, self.head = layers.Dense(4, activation="tanh", name="hidden"), layers.Dense(2, name="head")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(self.hidden(x))


def built_net() -> Any:
    model = Net()
    model.build((None, 3))
    return model


#: A model without values, one around a model that has them, and a subclass.
KINDS: dict[str, Callable[[], Any]] = {
    "builder": lambda: smp.DistributedModel(functional),
    "built": lambda: smp.DistributedModel(functional()),
    "subclass": built_net,
}


def compiled(kind: str, seed: int) -> Any:
    tf_keras.utils.set_random_seed(seed)
    model = KINDS[kind]()
    model.compile(tf_keras.optimizers.Adam(0.01), loss="mse")
    return model


def fit(model: Any) -> list[float]:
    losses: list[float] = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses


def same(first: Any, second: Any) -> bool:
    return all(map(np.array_equal, first, second)) and len(first) == len(second)


def manager_of(model: Any, folder: Path) -> Any:
    return smp.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=model.optimizer), folder)


@pytest.mark.parametrize("kind", params(KINDS, ["built", "subclass"]))
def test_what_was_restored_is_saved_and_listed_before_a_step(kind: str, tmp_path: Path) -> None:
    model = compiled(kind, 1)
    fit(model)
    manager_of(model, tmp_path / "c").save()
    kept = model.get_weights()
    model.save_weights(tmp_path / "kept.weights.h5")
    later = compiled(kind, 2)
    manager_of(later, tmp_path / "c").restore()
    assert same(later.get_weights(), kept)
    later.save_weights(tmp_path / "early.weights.h5")
    later.save_weights(tmp_path / "early")
    plain = functional() if kind != "subclass" else None
    if plain is not None:
        later.save_model(tmp_path / "early.keras")
        later.save_model(tmp_path / "early_folder")
        for path in ("early.keras", "early_folder", "early.weights.h5", "early"):
            plain.set_weights([np.zeros_like(value) for value in kept])
            plain.load_weights(tmp_path / path)
            assert same(plain.get_weights(), kept), path
    # The training goes on as that which was saved.
    assert fit(later) == fit(model)
    assert same(later.get_weights(), model.get_weights())


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_restore_they_are_the_initial_values(kind: str, tmp_path: Path) -> None:
    model, other = compiled(kind, 3), compiled(kind, 3)
    first = model.get_weights()
    other.save_weights(tmp_path / "first.weights.h5")
    for again in (model, other):
        assert same(again.get_weights(), first)
    assert fit(model) == fit(other) == fit(compiled(kind, 3))
    assert not same(model.get_weights(), first)


@pytest.mark.full
def test_the_last_call_before_it_wins(tmp_path: Path) -> None:
    model = compiled("builder", 1)
    fit(model)
    manager_of(model, tmp_path / "c").save()
    given = [np.full(weight.shape, 0.25, np.float32) for weight in model.get_weights()]
    later = compiled("builder", 2)
    manager_of(later, tmp_path / "c").restore()
    later.set_weights(given)
    assert same(later.get_weights(), given)
    later.set_weights([2 * weight for weight in given])
    assert same(later.get_weights(), [2 * weight for weight in given])
    manager_of(later, tmp_path / "c").restore()
    assert same(later.get_weights(), model.get_weights())


def test_a_model_without_variables_yet_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"makes its weights when it is first called.*or call model.build\(input_shape"):
        Net().save_weights(tmp_path / "w")


@pytest.mark.full
def test_what_a_checkpoint_lacks_is_told_when_weights_are_asked_for(tmp_path: Path) -> None:
    small = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Input((3,)), layers.Dense(2, name="one")]))
    small.compile(tf_keras.optimizers.Adam(0.01), loss="mse")
    fit(small)
    manager_of(small, tmp_path / "c").save()
    model = compiled("builder", 2)
    manager_of(model, tmp_path / "c").restore()
    with pytest.raises(smp.errors.CheckpointError, match="holds other shapes or dtypes"):
        model.get_weights()


def test_a_profile_comes_before(two_partitions: Callable[[], None]) -> None:
    model = compiled("builder", 1)
    model.get_weights()
    with pytest.raises(StepError, match=r"The weights of model 'net' were saved or asked .* profile before that\."):
        model.profile(tf.zeros([8, 3]))

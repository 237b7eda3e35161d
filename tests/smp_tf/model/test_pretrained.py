"""Models that plain Keras has trained and kept in files, loaded while a distributed model is made."""

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
from tests.full_only import params

pytestmark = pytest.mark.large

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10.0
MODELS = {"keras": "m.keras", "hdf5": "m.h5", "saved model": "m"}
WEIGHTS = {"weights.h5": "w.weights.h5", "hdf5": "w.h5", "checkpoint": "w", "keras": "m.keras"}


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=2)


def functional() -> tf_keras.Model:
    inputs = layers.Input((3,))
    hidden = layers.BatchNormalization(name="normal")(layers.Dense(4, activation="tanh", name="hidden")(inputs))
    return tf_keras.Model(inputs, layers.Dense(2, name="head")(hidden), name="reader")


def pretrained(seed: int) -> tf_keras.Model:
    """A model as plain Keras has trained it; names are the same for every one."""
    model, drawn = functional(), np.random.default_rng(seed)
    model.set_weights([drawn.uniform(0.1, 1.0, w.shape).astype(w.dtype) for w in model.get_weights()])
    return model


def predictions(model: Any) -> np.ndarray:
    @smp.step
    def predict(x: tf.Tensor) -> tf.Tensor:
        return model(x, training=False)

    return predict(X).concat().numpy()


@pytest.mark.parametrize("form", MODELS)
def test_a_builder_may_load_a_model(form: str, tmp_path: Path) -> None:
    source = pretrained(1)
    source.save(tmp_path / MODELS[form])
    model = smp.DistributedModel(lambda: tf_keras.models.load_model(tmp_path / MODELS[form]))
    assert predictions(model) == pytest.approx(source(X).numpy(), abs=1e-6)


@pytest.mark.parametrize("form", params(MODELS, ["hdf5"]))
def test_a_model_that_was_trained_by_fit_is_loaded_with_its_optimizer(form: str, tmp_path: Path) -> None:
    source = pretrained(1)
    source.compile("adam", "mse")
    source.fit(X, X[:, :2], batch_size=2, verbose=0)
    source.save(tmp_path / MODELS[form])
    model = smp.DistributedModel(lambda: tf_keras.models.load_model(tmp_path / MODELS[form]))
    assert predictions(model) == pytest.approx(source(X).numpy(), abs=1e-6)


@pytest.mark.parametrize("form", WEIGHTS)
def test_a_builder_may_load_weights(form: str, tmp_path: Path) -> None:
    source, path = pretrained(1), tmp_path / WEIGHTS[form]
    source.save(path) if form == "keras" else source.save_weights(path)

    def build() -> tf_keras.Model:
        model = functional()
        model.load_weights(path)
        return model

    assert predictions(smp.DistributedModel(build)) == pytest.approx(source(X).numpy(), abs=1e-6)


class Pair(smp.DistributedModel):
    def __init__(self, load: Callable[[int], Any]) -> None:
        super().__init__()
        self.one, self.other = load(1), load(2)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.one(x, training=training) + 10.0 * self.other(x, training=training)


@pytest.mark.parametrize("form", params(MODELS, ["hdf5"]))
def test_two_models_of_the_same_names_in_one(form: str, tmp_path: Path) -> None:
    sources = {seed: pretrained(seed) for seed in (1, 2)}
    for seed, source in sources.items():
        (tmp_path / str(seed)).mkdir()
        source.save(tmp_path / str(seed) / MODELS[form])
    model = Pair(lambda seed: tf_keras.models.load_model(tmp_path / str(seed) / MODELS[form]))
    expected = sources[1](X).numpy() + 10.0 * sources[2](X).numpy()
    assert predictions(model) == pytest.approx(expected, abs=1e-5)
    model.save_model(tmp_path / "both")
    assert tf_keras.models.load_model(tmp_path / "both")(X).numpy() == pytest.approx(expected, abs=1e-5)
    model.save_weights(tmp_path / "both.weights.h5")


def test_two_models_that_were_there_before_in_one() -> None:
    sources = {seed: pretrained(seed) for seed in (1, 2)}
    expected = sources[1](X).numpy() + 10.0 * sources[2](X).numpy()
    model = Pair(sources.__getitem__)
    assert predictions(model) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("form", ["keras", "hdf5"])
def test_what_a_builder_loads_is_read_at_the_first_step(form: str, tmp_path: Path, hdf5_reads: list[str]) -> None:
    pretrained(1).save(tmp_path / MODELS[form])
    model = smp.DistributedModel(lambda: tf_keras.models.load_model(tmp_path / MODELS[form], compile=False))
    assert hdf5_reads == []
    predictions(model)
    assert len(hdf5_reads) == len(model.weights)

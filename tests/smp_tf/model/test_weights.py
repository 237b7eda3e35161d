"""Files and lists of weights go from and to plain Keras models, before the first step and after it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import CheckpointError, OwnershipError, StepError

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10.0


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=2)


def net_of(base: Any) -> Any:
    class Net(base):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.hidden = layers.Dense(4, activation="tanh")
            self.inner = tf_keras.Sequential([layers.BatchNormalization(), layers.Dense(3)])
            self.head = layers.Dense(2)

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            return self.head(self.inner(self.hidden(x), training=training))

    return Net()


def functional() -> tf_keras.Model:
    inputs = layers.Input((3,))
    hidden = layers.BatchNormalization(name="normal")(layers.Dense(4, activation="tanh", name="hidden")(inputs))
    return tf_keras.Model(inputs, layers.Dense(2, name="head")(hidden), name="fun")


# How a distributed model and a plain one of the same kind are made.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "subclass": (lambda: net_of(smp.DistributedModel), lambda: net_of(tf_keras.Model)),
    "builder": (lambda: smp.DistributedModel(functional), functional),
    "wrapped": (lambda: smp.DistributedModel(functional()), functional),
}
FILES = ["w.weights.h5", "w.h5", "w"]


def predictions(model: Any) -> np.ndarray:
    @smp.step
    def predict(x: tf.Tensor) -> tf.Tensor:
        return model(x, training=False)

    return predict(X).concat().numpy()


def scrambled(model: Any) -> Any:
    """A plain model, built, with weights of its own."""
    model(X)
    drawn = np.random.default_rng(3)
    model.set_weights([drawn.uniform(0.1, 1.0, w.shape).astype(w.dtype) for w in model.get_weights()])
    return model


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_keras_loads_before_the_first_step_and_after_it(kind: str, file: str, tmp_path: Path) -> None:
    distributed, plain = KINDS[kind]
    source = scrambled(plain())
    source.save_weights(tmp_path / file)
    early, late = distributed(), distributed()
    early.load_weights(tmp_path / file)
    assert predictions(early) == pytest.approx(source(X).numpy(), abs=1e-6)
    assert predictions(late) != pytest.approx(source(X).numpy(), abs=1e-6)
    late.load_weights(tmp_path / file)
    assert predictions(late) == pytest.approx(source(X).numpy(), abs=1e-6)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_ours_loads_into_plain_keras(kind: str, file: str, tmp_path: Path) -> None:
    distributed, plain = KINDS[kind]
    model, target = distributed(), scrambled(plain())
    expected = predictions(model)
    assert target(X).numpy() != pytest.approx(expected, abs=1e-6)
    model.save_weights(tmp_path / file)
    target.load_weights(tmp_path / file)
    assert target(X).numpy() == pytest.approx(expected, abs=1e-6)


def test_nothing_but_the_files_is_left(tmp_path: Path) -> None:
    model = KINDS["subclass"][0]()
    predictions(model)
    for file in FILES:
        model.save_weights(tmp_path / file)
    others = ["checkpoint", "w.h5", "w.index", "w.weights.h5"]
    # No save takes the name of a file with values that the index in place needs.
    for values in (["00000-of-00002", "00001-of-00002"], ["00000-of-00001"], ["00000-of-00002", "00001-of-00002"]):
        model.save_weights(tmp_path / "w")
        found = sorted(path.name for path in tmp_path.iterdir())
        assert found == sorted([*others, *(f"w.data-{number}" for number in values)])
        plain = scrambled(KINDS["subclass"][1]())
        plain.load_weights(tmp_path / "w")
        assert plain(X).numpy() == pytest.approx(predictions(model), abs=1e-6)
    assert tf.train.latest_checkpoint(tmp_path) == str(tmp_path / "w")


@pytest.mark.parametrize("kind", ["builder", "wrapped"])
def test_weights_in_a_model_file_and_in_a_saved_model_load(kind: str, tmp_path: Path) -> None:
    source = scrambled(functional())
    source.save(tmp_path / "m.keras")
    source.save(tmp_path / "m")
    for file in ("m.keras", "m"):
        early, late = KINDS[kind][0](), KINDS[kind][0]()
        early.load_weights(tmp_path / file)
        assert predictions(early) == pytest.approx(source(X).numpy(), abs=1e-6)
        predictions(late)
        late.load_weights(tmp_path / file)
        assert predictions(late) == pytest.approx(source(X).numpy(), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("builder", "w"),
        ("builder", "w.h5"),
        pytest.param("builder", "m.keras", marks=pytest.mark.full),
        ("subclass", "w.h5"),
    ],
)
def test_another_file_of_the_same_name_is_not_taken_for_it(kind: str, file: str, tmp_path: Path) -> None:
    """Before the first step a value is only noted; what is read then is what was named."""
    model, source = KINDS[kind][0](), scrambled(KINDS[kind][1]())
    save = source.save if file.startswith("m") else source.save_weights
    save(tmp_path / file)
    model.load_weights(tmp_path / file)
    source.set_weights([weight + 1.0 for weight in source.get_weights()])
    save(tmp_path / file)
    with pytest.raises(
        CheckpointError, match=r"was replaced, changed or deleted between load_weights, .* after that step"
    ):
        predictions(model)


def test_a_file_that_is_gone_at_the_first_step_is_told(tmp_path: Path) -> None:
    model = smp.DistributedModel(functional)
    scrambled(functional()).save_weights(tmp_path / "w.h5")
    model.load_weights(tmp_path / "w.h5")
    (tmp_path / "w.h5").unlink()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/w\.h5 was replaced, changed or deleted"):
        predictions(model)


def test_a_file_may_be_gone_when_the_values_were_read(tmp_path: Path) -> None:
    """Before the first step a value is only noted; from then on nothing is read again."""
    source, model = scrambled(functional()), smp.DistributedModel(functional)
    source.save_weights(tmp_path / "w.h5")
    model.load_weights(tmp_path / "w.h5")
    predictions(model)
    (tmp_path / "w.h5").unlink()
    assert predictions(model) == pytest.approx(source(X).numpy(), abs=1e-6)


def test_loading_before_the_variables_exist_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, model = scrambled(net_of(tf_keras.Model)), net_of(smp.DistributedModel)
    source.save_weights(tmp_path / "w.h5")
    assert model.load_weights(tmp_path / "w.h5") is None
    said = capfd.readouterr().err
    assert f"The weights in '{tmp_path / 'w.h5'}' will be loaded when the first step has made the variables" in said


def test_by_name_and_leaving_out_what_does_not_fit(tmp_path: Path) -> None:
    source = scrambled(functional())
    source.save_weights(tmp_path / "w.h5")

    def wider() -> tf_keras.Model:
        inputs = layers.Input((3,))
        hidden = layers.Dense(4, activation="tanh", name="hidden")(inputs)
        return tf_keras.Model(inputs, layers.Dense(5, name="head")(hidden))

    for run_before in (False, True):
        model = smp.DistributedModel(wider)
        if run_before:
            predictions(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_weights(tmp_path / "w.h5", by_name=True, skip_mismatch=True)
        predictions(model)
        assert model.wrapped.get_layer("hidden").kernel.numpy().tolist() == source.get_weights()[0].tolist()


def test_what_a_checkpoint_gave_is_told(tmp_path: Path) -> None:
    source, model = scrambled(functional()), smp.DistributedModel(functional)
    source.save_weights(tmp_path / "w")
    status = model.load_weights(tmp_path / "w")
    assert sorted(status.loaded) == sorted(v.name for v in model.wrapped.variables)
    assert status.expect_partial().assert_consumed().assert_existing_objects_matched() is status

    class Longer(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = layers.Dense(4, name="hidden")
            self.extra = layers.Dense(2, name="extra")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.extra(self.hidden(x))

    shorter = net_of(tf_keras.Model)
    shorter(X)
    shorter.save_weights(tmp_path / "s")
    longer = Longer()
    predictions(longer)
    status = longer.load_weights(tmp_path / "s")
    assert status.missing == tuple(v.name for v in longer.extra.variables)
    with pytest.raises(AssertionError, match=r"has no value for .*extra/kernel"):
        status.assert_consumed()


class TestErrors:
    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"There are no weights at '.*/nothing': it is neither a file, nor"):
            smp.DistributedModel(functional).load_weights(tmp_path / "nothing")

    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("after", [False, True])
    def test_shapes_that_do_not_fit(self, file: str, after: bool, tmp_path: Path) -> None:
        inputs = layers.Input((3,))
        hidden = layers.BatchNormalization(name="normal")(layers.Dense(4, name="hidden")(inputs))
        other = tf_keras.Model(inputs, layers.Dense(7, name="head")(hidden))
        other.save_weights(tmp_path / file)
        model = smp.DistributedModel(functional)
        before = predictions(model) if after else None
        with pytest.raises(ValueError, match=r"shape \(4, 2\).*shape \(4, 7\)|shape \(4, 7\).*shape \(4, 2\)"):
            model.load_weights(tmp_path / file)
        if file == "w" and after:
            assert predictions(model).tolist() == before.tolist(), "half of it was loaded"

    def test_a_checkpoint_of_something_else(self, tmp_path: Path) -> None:
        tf.train.Checkpoint(x=tf.Variable(1.0)).write(str(tmp_path / "w"))
        with pytest.raises(ValueError, match="has no value for any variable of the model"):
            smp.DistributedModel(functional).load_weights(tmp_path / "w")

    def test_names_with_a_checkpoint(self, tmp_path: Path) -> None:
        scrambled(functional()).save_weights(tmp_path / "w")
        with pytest.raises(ValueError, match="by_name and skip_mismatch are for weights in HDF5 files"):
            smp.DistributedModel(functional).load_weights(tmp_path / "w", by_name=True)

    @pytest.mark.parametrize("method", ["save_weights", "load_weights"])
    def test_options_of_tensorflow(self, method: str, tmp_path: Path) -> None:
        model = smp.DistributedModel(functional)
        predictions(model)
        with pytest.raises(StepError, match=f"{method} of a distributed model takes no options"):
            getattr(model, method)(tmp_path / "w", options=tf.train.CheckpointOptions(enable_async=True))

    @pytest.mark.parametrize("file", FILES)
    def test_overwriting_what_is_to_be_kept(self, file: str, tmp_path: Path) -> None:
        model = smp.DistributedModel(functional)
        predictions(model)
        model.save_weights(tmp_path / file, overwrite=False)
        with pytest.raises(StepError, match=r"There are weights in .* already, and overwrite=False was given"):
            model.save_weights(tmp_path / file, overwrite=False)

    def test_formats_that_do_not_go_with_the_path(self, tmp_path: Path) -> None:
        model = smp.DistributedModel(functional)
        predictions(model)
        with pytest.raises(ValueError, match='save_format="tf" does not go with the path'):
            model.save_weights(tmp_path / "w.h5", save_format="tf")
        with pytest.raises(ValueError, match=r"save_format is .tf. or .h5.\. Received: save_format='npz'"):
            model.save_weights(tmp_path / "w", save_format="npz")

    def test_before_the_first_step(self, tmp_path: Path) -> None:
        model = net_of(smp.DistributedModel)
        with pytest.raises(StepError, match="has not run a step yet, so there is nothing to save"):
            model.save_weights(tmp_path / "w")
        with pytest.raises(StepError, match=r"makes its weights when it is first called.* model.build\(input_shape\)"):
            model.set_weights([np.zeros([3, 4])])


class TestLists:
    def test_with_one_partition_they_are_those_of_keras(self) -> None:
        model = smp.DistributedModel(functional)
        before = predictions(model)
        weights = model.get_weights()
        assert [type(w) for w in weights] == [np.ndarray] * len(model.weights)
        model.set_weights([w * 0 for w in weights])
        assert predictions(model).tolist() == [[0.0, 0.0]] * 4
        model.set_weights(weights)
        assert predictions(model).tolist() == before.tolist()

    @pytest.mark.parametrize("kind", KINDS)
    def test_set_before_the_first_step_they_are_what_the_model_begins_with(self, kind: str) -> None:
        distributed, plain = KINDS[kind]
        source, model = scrambled(plain()), distributed()
        model.build((None, 3))
        values = source.get_weights()
        model.set_weights(values)
        for value in values:
            value[...] = 0.0  # the values are taken at once, as by any assignment
        assert predictions(model) == pytest.approx(source(X).numpy(), abs=1e-6)

    def test_a_wrong_number_and_a_wrong_shape_change_nothing(self) -> None:
        model = smp.DistributedModel(functional)
        before, weights = predictions(model), [w * 0 for w in model.get_weights()]
        with pytest.raises(ValueError, match=r"has 8 weights. Received: a list of 7 weights"):
            model.set_weights(weights[:-1])
        weights[-1] = np.zeros(5, np.float32)
        with pytest.raises(ValueError, match=r"Weight 7, 'head/bias:0', has shape \(2,\). Received: .* shape \(5,\)"):
            model.set_weights(weights)
        assert predictions(model).tolist() == before.tolist()


class TestAssigningBeforeTheFirstStep:
    def test_takes_the_place_of_the_initial_value(self) -> None:
        """So that builders which load pre-trained weights work as they are."""

        def pretrained() -> tf_keras.Model:
            model = functional()
            model.set_weights([np.full(w.shape, 0.5, np.float32) for w in model.weights])
            return model

        model = smp.DistributedModel(pretrained)
        plain = pretrained()
        assert predictions(model) == pytest.approx(plain(X).numpy(), abs=1e-6)

    def test_of_another_shape_is_an_error(self) -> None:
        model = smp.DistributedModel(functional)
        with pytest.raises(ValueError, match=r"value of shape \(3,\) to variable 'head/bias' of shape \(2,\)"):
            model.wrapped.get_layer("head").bias.assign([1.0, 2.0, 3.0])

    def test_reading_it_back_is_still_an_error(self) -> None:
        model = smp.DistributedModel(functional)
        model.wrapped.get_layer("head").bias.assign([1.0, 2.0])
        with pytest.raises(OwnershipError, match="Cannot read variable 'head/bias' yet"):
            model.wrapped.get_layer("head").bias.numpy()


def test_a_large_file_is_not_held_before_the_first_step(tmp_path: Path, hdf5_reads: list[str]) -> None:
    source, model = scrambled(functional()), smp.DistributedModel(functional)
    source.save_weights(tmp_path / "w.h5")
    model.load_weights(tmp_path / "w.h5")
    assert hdf5_reads == []
    predictions(model)
    assert len(hdf5_reads) == len(model.weights)

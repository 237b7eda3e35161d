"""Keras gives and takes values one at a time where it reads and writes files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf import tf_internals
from smp_tf.keras import archives

pytestmark = pytest.mark.usefixtures("keras_defaults")


@pytest.mark.parametrize(("file", "archive"), [("m.keras", "m.keras"), ("m.h5", None)])
def test_values_of_a_model_file_are_given_as_what_can_be_read_again(
    file: str, archive: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tf_keras.Sequential([layers.Input((2,)), layers.Dense(1)]).save(tmp_path / file)
    given: list[tuple[str, str | None]] = []

    def assign(variable: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        assert isinstance(value, h5py.Dataset)
        given.append((str(value.file.filename), archives.archive_of(value)))

    class Noting(tf_internals.UninitializedVariable):  # type: ignore[misc]
        pass

    monkeypatch.setattr(Noting, "assign", assign)

    def make(next_creator: Any, **kwargs: Any) -> Any:
        return Noting(shape=kwargs["shape"], dtype=kwargs["dtype"], name=kwargs["name"])

    with tf.variable_creator_scope(make), archives.values_read_late():
        tf_keras.models.load_model(tmp_path / file, compile=False)
    if archive is not None:
        assert {found for _, found in given} == {str(tmp_path / archive)}
    else:
        assert given == [(str(tmp_path / file), None)] * 2
    assert len(given) == 2


def small_model() -> Any:
    return tf_keras.Sequential([tf_keras.layers.Input((2,)), tf_keras.layers.Dense(3), tf_keras.layers.Dense(1)])


@pytest.mark.parametrize("name", ["w.h5", "m.h5", "m.keras"])
def test_keras_writes_values_one_by_one_and_none_in_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = small_model(), []
    original = tf_internals.ResourceVariable.numpy

    def noted(variable: Any) -> Any:
        read.append((variable.name, sorted(path.name for path in tmp_path.iterdir())))
        return original(variable)

    def in_memory() -> None:
        raise AssertionError("Keras makes the file in memory")

    with archives.values_one_by_one(), monkeypatch.context() as patched:
        patched.setattr(tf_internals.ResourceVariable, "numpy", noted)
        patched.setattr(archives.saving_lib.io, "BytesIO", in_memory)
        model.save_weights(tmp_path / name) if name == "w.h5" else model.save(tmp_path / name)
    assert [variable for variable, _ in read] == [v.name for v in model.variables]
    assert all(files for _, files in read), "a value was read before there was a file to write it to"
    loaded = small_model()
    loaded.load_weights(tmp_path / name)
    assert [v.numpy().tolist() for v in loaded.variables] == [v.numpy().tolist() for v in model.variables]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_keras_gives_what_it_reads_to_assign_unread(tmp_path: Path) -> None:
    model, given = small_model(), []
    model.save_weights(tmp_path / "w.h5")

    class Noting(tf_internals.ResourceVariable):  # type: ignore[misc, valid-type]
        def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
            given.append(type(value).__name__)

    loaded = small_model()
    for variable in loaded.variables:
        variable.__class__ = Noting
    with archives.values_one_by_one():
        loaded.load_weights(tmp_path / "w.h5")
    assert given == ["Dataset"] * 4


def test_keras_is_as_before_after_that() -> None:
    keras = archives.backend, archives.hdf5_format, archives.saving_lib
    before = [vars(module).copy() for module in keras]

    def fails() -> None:
        with archives.values_one_by_one():
            assert [vars(module) for module in keras] != before
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fails()
    assert [vars(module) for module in keras] == before


@pytest.mark.parametrize("kind", [tf.train.CheckpointOptions, tf.saved_model.SaveOptions])
def test_default_options_are_told_from_others(kind: type) -> None:
    assert archives.is_default_options(kind())
    assert not archives.is_default_options(kind(experimental_io_device="/job:localhost"))

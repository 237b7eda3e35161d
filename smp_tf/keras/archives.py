"""What tf_keras writes and reads of models: weights, whole models and summaries.

Private pieces work with tf_keras 2.21. tests/smp_tf/keras/test_archives.py fails when they change.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras.src import backend
from tf_keras.src.saving import saving_lib
from tf_keras.src.saving.legacy import hdf5_format

from smp_tf.keras.patch import replaced
from smp_tf.keras.serving import signature_of_fed
from smp_tf.tf_internals import ResourceVariable


class _ReadLater:
    """Stands for the value of a variable in Keras's lists of all values of a file."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self.shape = tuple(variable.shape)
        self.dtype = variable.dtype.base_dtype.as_numpy_dtype

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self._variable.numpy(), *args, **kwargs)


#: The zip file of every HDF5 file that Keras now reads from within one, by HDF5's number for an open file.
_archives: dict[int, str] = {}


def archive_of(dataset: h5py.Dataset) -> str | None:
    """Returns the `.keras` file that holds the HDF5 file of a dataset, while `values_read_late` has Keras read it."""
    return _archives.get(_number_of_file(dataset))


def _number_of_file(part: h5py.HLObject) -> int:
    number: int = h5py.h5o.get_info(part.id).fileno
    return number


class _OnDisk(saving_lib.H5IOStore):
    """A store of weights for a `.keras` file that is on disk next to the file. Keras's own is in memory.

    `archive_of` knows a store that is being read until it is closed.
    """

    def __init__(self, root_path: Any, archive: Any = None, mode: str = "r") -> None:
        self._inner, self._number = None, None
        if archive is None or mode != "w":
            super().__init__(root_path, archive=archive, mode=mode)
            if archive is not None and archive.filename is not None:
                self._number = _number_of_file(self.h5_file)
                _archives[self._number] = os.path.abspath(archive.filename)
            return
        self._inner, self._into = str(root_path), archive
        # It is kept open until close().
        self._file = tempfile.NamedTemporaryFile(dir=os.path.dirname(archive.filename), suffix=".h5")  # noqa: SIM115
        super().__init__(self._file.name, mode="w")

    def close(self) -> None:
        if self._number is not None:
            _archives.pop(self._number, None)
        super().close()
        if self._inner is not None:
            self._into.write(self._file.name, self._inner)
            self._file.close()


@contextlib.contextmanager
def values_read_late() -> Iterator[None]:
    """Makes Keras, within its context, give variables the HDF5 datasets that it reads, and not their contents.

    Otherwise Keras reads all weights of an HDF5 file before it assigns the first. It also reads the file of a model
    through TensorFlow's file system, where HDF5 does not know its path.
    """
    load_model = hdf5_format.load_model_from_hdf5

    def read(group: Any) -> list[Any]:
        return [group[name] for name in hdf5_format.load_attributes_from_hdf5_group(group, "weight_names")]

    def give(pairs: Iterable[tuple[Any, Any]]) -> None:
        for variable, value in pairs:
            variable.assign(np.asarray(value) if type(variable) is ResourceVariable else value)

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        is_here = isinstance(file, tf.io.gfile.GFile) and os.path.isfile(file.name)
        return load_model(file.name if is_here else file, *args, **kwargs)

    with replaced(
        (backend, "batch_set_value", give),
        (hdf5_format, "load_subset_weights_from_hdf5_group", read),
        (hdf5_format, "load_model_from_hdf5", load),
        (saving_lib, "H5IOStore", _OnDisk),
    ):
        yield


@contextlib.contextmanager
def values_one_by_one() -> Iterator[None]:
    """Makes Keras, within its context, write and read weights one value at a time, and assign values as read.

    Otherwise Keras reads all weights of an HDF5 file before it assigns the first, and makes a `.keras` file in memory.
    """

    def get(tensors: Iterable[Any]) -> list[Any]:
        return [_ReadLater(tensor) for tensor in tensors]

    with values_read_late(), replaced((backend, "batch_get_value", get)):
        yield


def is_default_options(options: Any) -> bool:
    """Returns whether options for saving are those that Keras's callbacks make when they are given none.

    It works with tf.train.CheckpointOptions and tf.saved_model.SaveOptions of TensorFlow 2.16 to 2.21, whose fields are
    their slots.
    """
    fresh = type(options)()
    return all(getattr(options, name) == getattr(fresh, name) for name in type(options).__slots__)


def write_weights(model: Any, path: str) -> None:
    """Writes a model's weights into an HDF5 file."""
    tf_keras.Model.save_weights(model, path, save_format="h5")


def read_weights(model: Any, path: str, skip_mismatch: bool, by_name: bool) -> None:
    """Reads a model's weights from an HDF5 file or a model file."""
    tf_keras.Model.load_weights(model, path, skip_mismatch=skip_mismatch, by_name=by_name)


def knows_inputs(model: Any) -> bool:
    """Returns whether a model knows what it is called with, as a SavedModel of it must."""
    return model.save_spec() is not None


def write_model(
    model: Any,
    path: str,
    form: str,
    fed: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    *,
    with_optimizer: bool = False,
) -> None:
    """Writes a model.

    Args:
        model: the model.
        path: file or folder.
        form: "keras" (which has the optimizer's settings), "h5", or "tf" for a SavedModel.
        fed: types of the arguments that the model was called with, positional ones and those by keyword. The signature
            of a SavedModel takes them. None lets Keras choose.
        with_optimizer: whether the state of its optimizer is written as well.
    """
    options = {} if form == "keras" else {"include_optimizer": with_optimizer}
    with signature_of_fed(model, fed):
        tf_keras.models.save_model(model, path, save_format=form, **options)


def summary(model: Any, options: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a model's summary."""
    lines: list[str] = []
    tf_keras.Model.summary(model, print_fn=lambda line: lines.append(str(line)), **options)
    return lines

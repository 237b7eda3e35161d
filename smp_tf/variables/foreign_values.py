"""Decides what reading and writing weights of other ranks does: an error, except with files of weights.

While a rank writes a file of all weights, it fetches each foreign weight when it reads it (`fetched_by`). While all
ranks read such a file, each leaves out what it does not store (`left_out`), without reading it from the file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from smp_tf.files.noted_files import NotedFiles
from smp_tf.keras import adapter


class _InForce(threading.local):
    fetch: Callable[[Any], Any] | None = None
    leaves_out = False


_in_force = _InForce()


@contextlib.contextmanager
def fetched_by(fetch: Callable[[Any], Any]) -> Iterator[None]:
    """Lets variables without a value here be read within its context.

    Args:
        fetch: returns the value of a variable, as a tensor.
    """
    before = _in_force.fetch
    _in_force.fetch = fetch
    try:
        yield
    finally:
        _in_force.fetch = before


def fetch() -> Callable[[Any], Any] | None:
    """Returns the function that gets the value of a variable of another rank; None where reading it is an error."""
    return _in_force.fetch


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Leaves out assignments to variables that another rank stores, within its context."""
    before = _in_force.leaves_out
    _in_force.leaves_out = True
    try:
        yield
    finally:
        _in_force.leaves_out = before


def leaves_out() -> bool:
    """Returns whether assignments to variables of other ranks are left out."""
    return _in_force.leaves_out


def later(value: Any, dtype: tf.DType) -> Callable[[], Any]:
    """Returns a function that returns a value later. It holds nothing that can be read from its file again.

    It raises a `CheckpointError` where the file has changed by then.

    Args:
        value: a tensor, an array, or a dataset of an HDF5 file that may be closed by then.
        dtype: the type for a value that is none of these.
    """
    if not isinstance(value, h5py.Dataset):
        # Like an assignment, this takes the present value.
        kept = np.array(value) if isinstance(value, np.ndarray) else tf.convert_to_tensor(value, dtype)
        return lambda: kept
    name, archive = value.name, adapter.archives().archive_of(value)
    if archive is not None:
        noted = NotedFiles(archive)
        return lambda: noted.read(lambda: _from_archive(archive, name))
    path = os.path.abspath(value.file.filename)
    if not os.path.isfile(path):
        # HDF5 in memory, or in a stream, may be gone by then.
        read = np.asarray(value)
        return lambda: read
    noted = NotedFiles(path)
    return lambda: noted.read(lambda: _from_file(path, name))


def as_array(value: Any) -> Any:
    """Returns a value that TensorFlow can take. It reads one that is in a file."""
    return np.asarray(value) if isinstance(value, h5py.Dataset) else value


def _from_file(path: str, name: str) -> np.ndarray:
    with h5py.File(path, "r") as file:
        return np.asarray(file[name])


def _from_archive(path: str, name: str) -> np.ndarray:
    with zipfile.ZipFile(path) as archive:
        [inner] = [member for member in archive.namelist() if member.endswith(".h5")]
        with archive.open(inner) as stored, h5py.File(stored, "r") as file:
            return np.asarray(file[name])

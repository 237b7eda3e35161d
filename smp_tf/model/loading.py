"""Reads weights into a split model. Every rank reads the file, but only the values that it stores.

Keras's own readers find out which value belongs to which variable. Before the plan exists, a value is only noted. Its
owner reads it at the first step.
"""

from __future__ import annotations

import os
from typing import Any

from smp_tf.announce import announce
from smp_tf.files.noted_files import NotedFiles
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.model import tf_checkpoint
from smp_tf.variables import foreign_values, precedence
from smp_tf.variables.models import SplitModel


def load_weights(
    model: SplitModel, path: str | os.PathLike[str], skip_mismatch: bool = False, by_name: bool = False
) -> tf_checkpoint.LoadStatus | None:
    """Reads the weights of a model, for `DistributedModel.load_weights`.

    Args:
        model: a distributed model.
        path: a file that `save_weights` wrote, a `.keras` file, the prefix of a checkpoint, or a SavedModel.
        skip_mismatch: whether to leave out layers whose weights do not fit.
        by_name: whether to match layers by their names instead of their order; HDF5 only.

    Returns:
        What was found in a checkpoint that was read now; else None.

    Raises:
        FileNotFoundError: there are no weights at the path.
        ValueError: the weights do not fit the model.
    """
    path = os.fspath(path)
    prefix = tf_checkpoint.prefix_of(path)
    if prefix is None and not os.path.isfile(path):
        raise FileNotFoundError(
            f"There are no weights at {path!r}: it is neither a file, nor the prefix of a checkpoint ({path}.index), "
            f"nor the folder of a SavedModel."
        )
    if prefix is not None and (by_name or skip_mismatch):
        raise ValueError(
            f"by_name and skip_mismatch are for weights in HDF5 files; {prefix!r} is a checkpoint of TensorFlow."
        )
    target = model._smp_keras_model
    if target.built:
        return _load(target, path, prefix, skip_mismatch, by_name)
    # A model that makes its variables when it is first called has none yet.
    noted = NotedFiles(*(tf_checkpoint.files_of(prefix) if prefix is not None else [path]))

    def load() -> None:
        noted.read(lambda: _load(target, path, prefix, skip_mismatch, by_name))

    model._smp_store.before_settling(load)
    announce(
        f"The weights in {path!r} will be loaded when the first step has made the variables of model {model.name!r}.",
        runtime.current().topology.rank,
    )
    return None


def _load(
    target: Any, path: str, prefix: str | None, skip_mismatch: bool, by_name: bool
) -> tf_checkpoint.LoadStatus | None:
    noting = precedence.noting(adapter.layers().variables_of(target))
    with foreign_values.left_out(), adapter.archives().values_one_by_one(), noting:
        if prefix is not None:
            return tf_checkpoint.read(target, prefix)
        adapter.archives().read_weights(target, path, skip_mismatch, by_name)
    return None

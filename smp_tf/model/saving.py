"""Writes a whole model to a file or folder. Keras writes the structure; the values are fetched one at a time.

| path            | what is written                | loads into                                            |
|-----------------|--------------------------------|-------------------------------------------------------|
| folder          | SavedModel                     | tf_keras.models.load_model, without the class         |
| `.keras`, `.h5` | model file of a wrapped model  | tf_keras.models.load_model                            |
| `.weights.h5`   | the weights alone              | load_weights of the same class with tf_keras.Model as |
|                 |                                | its base, or of the model that was wrapped            |

In each case it is written in a folder of its own next to its place, and moved there when it is complete and on disk.
Until then, what was there before is whole. Other files in a folder with an earlier SavedModel stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from smp_tf.errors import StepError
from smp_tf.files import durable_files
from smp_tf.keras import adapter
from smp_tf.model import saved_model_folder, tf_checkpoint
from smp_tf.steps import early_places
from smp_tf.variables import store
from smp_tf.variables.fetch import write_with_all_weights
from smp_tf.variables.model_context import save_structure, writing_model
from smp_tf.variables.models import SplitModel, is_built

_HDF5 = (".h5", ".hdf5")


def save_model(model: SplitModel, path: str | os.PathLike[str], *, with_optimizer: bool = False) -> None:
    """Writes the whole, unsplit model, for `DistributedModel.save_model`.

    Args:
        model: a distributed model that is built.
        path: folder or file to write.
        with_optimizer: whether the optimizer's state is written as well. All of it is on this rank.

    Raises:
        StepError: the model is not built yet, a model of this kind cannot be written to such a file, or what is
            there cannot be replaced.
        RankMismatchError: not every rank saves it.
    """
    path = os.fspath(path)
    if path.endswith(".weights.h5"):
        save_weights(model, path)
        return
    is_file = path.endswith((".keras", *_HDF5))
    if is_file and model._smp_keras_model is model:
        raise StepError(
            f"A subclass of smp.DistributedModel cannot be written as a {os.path.splitext(path)[1]} file, which would "
            f"need the class to be loaded. Received: path={path!r}. Leave out the extension to write a SavedModel, "
            f"which tf_keras.models.load_model reads without the class, or write the weights alone, to a path that "
            f"ends in .weights.h5."
        )
    doing = f"saving model {model.name!r}"
    if not is_file and is_built(model) and not adapter.archives().knows_inputs(model._smp_keras_model):
        raise StepError(
            f"Model {model.name!r} has not been called yet, so it is not known what a SavedModel of it takes. Run a "
            f"step, or call the model on tf_keras.Input(shape). Its weights alone can be written to a path that ends "
            f"in .weights.h5."
        )
    if is_file:
        saved_model_folder.require_file_place(path)
        _write(model, path, doing, lambda built: _model_file(model, built, with_optimizer))
    else:
        saved_model_folder.require_folder_place(path)
        _write(
            model,
            path,
            doing,
            lambda built: _saved_model(model, built, with_optimizer),
            saved_model_folder.put_in_place,
            saved_model_folder.building,
        )


def save(
    model: SplitModel,
    path: str | os.PathLike[str],
    overwrite: bool,
    save_format: str | None,
    options: Mapping[str, Any],
) -> None:
    """Writes the whole model as Keras's `model.save` is asked to, for `DistributedModel.save`.

    Args:
        model: a distributed model that is built.
        path: folder or file to write.
        overwrite: whether what is there may be replaced.
        save_format: "tf", "keras" or "h5"; None where the path says it.
        options: further arguments of `save`.

    Raises:
        StepError: something is there and `overwrite` is false, the format does not fit the path, or an option is not
            supported.
    """
    path = os.fspath(path)
    extension = os.path.splitext(path)[1]
    by_path = {".keras": "keras", ".h5": "h5", ".hdf5": "h5"}.get(extension, "tf")
    if save_format is not None and save_format != by_path:
        raise StepError(
            f"The path says how a model is saved: a folder as a SavedModel, files by their end, .keras or .h5. "
            f"Received: path={path!r} with save_format={save_format!r}."
        )
    for name, value in options.items():
        is_default = value is None or (name == "options" and adapter.archives().is_default_options(value))
        if not is_default and (name, value) not in (("include_optimizer", False), ("save_traces", True)):
            raise StepError(
                f"model.save of a distributed model does not take {name}={value!r}. It writes the model without its "
                f"optimizer, whose state smp.CheckpointManager saves, and with its traces."
            )
    if not overwrite and os.path.exists(path):
        raise StepError(f"There is something in {path!r} already, and overwrite=False was given.")
    save_model(model, path)


def refuse_writer(model: SplitModel, writer: str) -> NoReturn:
    """Raises an error for what would write a SavedModel of a distributed model without the other ranks.

    Args:
        model: the model.
        writer: what was called.

    Raises:
        StepError: always.
    """
    raise StepError(
        f"{writer} cannot write model {model.name!r}, whose weights are on several ranks. Call "
        f"model.save_model(folder) on every rank. tf.saved_model.load and tf.keras.models.load_model read what it "
        f'writes, and its signature "serving_default" takes what the model was fed and gives "output_0". What needs a '
        f"model of Keras, such as model.export or a converter, can be given the one that was loaded."
    )


def save_weights(
    model: SplitModel, path: str | os.PathLike[str], overwrite: bool = True, save_format: str | None = None
) -> None:
    """Writes the weights of the whole model, for `DistributedModel.save_weights`.

    Args:
        model: a distributed model that is built.
        path: file to write or, in TensorFlow's format, the prefix of its files.
        overwrite: whether what is there may be replaced.
        save_format: "tf" or "h5"; by default "h5" where the path ends in .h5 or .keras, else "tf".

    Raises:
        StepError: the model is not built yet, or something is there and `overwrite` is false.
        RankMismatchError: not every rank saves them.
    """
    path = os.fspath(path)
    as_hdf5 = _is_hdf5(path, save_format)

    def write_hdf5(building: str) -> None:
        with adapter.archives().values_one_by_one():
            adapter.archives().write_weights(model._smp_keras_model, building)

    def write_checkpoint(building: str) -> None:
        tf_checkpoint.write(model, building, os.path.abspath(path))

    if not overwrite and os.path.exists(path if as_hdf5 else f"{path}.index"):
        raise StepError(f"There are weights in {path!r} already, and overwrite=False was given.")
    doing = f"saving the weights of model {model.name!r}"
    if as_hdf5:
        saved_model_folder.require_file_place(path)
        _write(model, path, doing, write_hdf5)
    else:
        _write(model, path, doing, write_checkpoint, tf_checkpoint.put_in_place)


def _is_hdf5(path: str, save_format: str | None) -> bool:
    by_name = path.endswith((".keras", *_HDF5))
    chosen = (save_format or ("h5" if by_name else "tf")).lower().strip()
    if chosen in ("h5", "hdf5", "keras"):
        return True
    if chosen not in ("tf", "tensorflow"):
        raise ValueError(f'save_format is "tf" or "h5". Received: save_format={save_format!r}')
    if by_name:
        raise ValueError(f'save_format="tf" does not go with the path {path!r}, which names an HDF5 file.')
    return False


def _write(
    model: SplitModel,
    path: str,
    doing: str,
    write: Callable[[str], None],
    put_in_place: Callable[[str, str], None] = durable_files.put_in_place,
    building: Callable[[str], AbstractContextManager[str]] = durable_files.building,
) -> None:
    """Lets rank 0 write to another path, which replaces the wanted one when all is written."""
    if not is_built(model):
        raise StepError(
            f"Model {model.name!r} makes its weights when it is first called, and has not run a step yet, so there is "
            f"nothing to save. Run a step, or call model.build(input_shape)."
        )
    early_places.place_now(model)
    place = os.path.abspath(path)

    def safely() -> None:
        with building(place) as built:
            with writing_model():
                write(built)
            put_in_place(built, place)

    write_with_all_weights(model, doing, safely)


def _model_file(model: SplitModel, path: str, with_optimizer: bool) -> None:
    with adapter.archives().values_one_by_one():
        form = "keras" if path.endswith(".keras") else "h5"
        adapter.archives().write_model(model._smp_keras_model, path, form, with_optimizer=with_optimizer)


def _saved_model(model: SplitModel, path: str, with_optimizer: bool) -> None:
    with save_structure():
        adapter.archives().write_model(
            model._smp_keras_model, path, "tf", model._smp_fed.known, with_optimizer=with_optimizer
        )
    if not any(map(store.is_remote, adapter.layers().variables_of(model))):
        # Keras has written all values.
        return
    prefix = os.path.join(path, "variables", "variables")
    tf_checkpoint.replace_values(prefix, model._smp_keras_model, adapter.layers().variables_of(model))

"""Reads and writes weights in the files of `tf.train.Checkpoint`, one at a time, by their place in the model.

Values are found as TensorFlow finds them, by walking the model and the object graph in the file together:

    model ──hidden──▶ layer ──kernel──▶ variable          the variable's value in the file
    node 0 ──hidden──▶ node 3 ──kernel──▶ node 8 ──────▶  "hidden/kernel/.ATTRIBUTES/VARIABLE_VALUE"
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from smp_tf.errors import StepError
from smp_tf.files import durable_files
from smp_tf.files.noted_files import NotedFiles
from smp_tf.keras import adapter
from smp_tf.variables import store
from smp_tf.variables.model_context import save_structure
from smp_tf.variables.models import SplitModel
from smp_tf.variables.state import set_initial_value

_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
#: The key of a tensor, and the function that makes its value.
_Tensor = tuple[str, Callable[[], Any]]


@dataclass(frozen=True)
class LoadStatus:
    """What `load_weights` of a checkpoint found. It is named like the result of `tf.train.Checkpoint.restore`.

    Args:
        path: the path that was read.
        loaded: names of the variables that were in the checkpoint.
        missing: names of the variables that were not in it.
    """

    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Raises an error unless every variable of the model was found."""
        if self.missing:
            raise AssertionError(f"{self.path!r} has no value for {', '.join(self.missing)}.")
        return self

    def assert_consumed(self) -> LoadStatus:
        """Raises an error unless every variable of the model was found."""
        return self.assert_existing_objects_matched()

    def assert_nontrivial_match(self) -> LoadStatus:
        """Raises an error unless some variable of the model was found."""
        if not self.loaded:
            raise AssertionError(f"{self.path!r} has no value for any variable of the model.")
        return self

    def expect_partial(self) -> LoadStatus:
        """Says that a part of the model is enough. There is no message about the rest."""
        return self


def prefix_of(path: str) -> str | None:
    """Returns the prefix of the checkpoint files that a path means; None where there are none.

    Args:
        path: a prefix, or the folder of a SavedModel.
    """
    for prefix in (path, os.path.join(path, "variables", "variables")):
        if os.path.isfile(f"{prefix}.index"):
            return prefix
    return None


def read(root: Any, prefix: str) -> LoadStatus:
    """Gives the variables of a model the values in a checkpoint. Only values that are stored here are read.

    Args:
        root: the model as it was saved.
        prefix: of the checkpoint's files.

    Returns:
        What was found.

    Raises:
        ValueError: a value has another shape than its variable, or there is a value for no variable of the model.
    """
    noted = NotedFiles(*files_of(prefix))
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    keys = {id(variable.handle): key for variable, key in _matched(root, reader.get_tensor(_GRAPH_KEY))}
    own = adapter.layers().variables_of(root)
    found = [(variable, keys[id(variable.handle)]) for variable in own if id(variable.handle) in keys]
    for variable, key in found:
        if not variable.shape.is_compatible_with(shapes[key]):
            raise ValueError(
                f"Variable {variable.name!r} has shape {tuple(variable.shape)}, but its value in {prefix!r} has shape "
                f"{tuple(shapes[key])}."
            )
    for variable, key in found:
        if not store.is_remote(variable):
            _give(variable, reader, key, noted)
    names = {id(variable.handle): variable.name for variable in own}
    missing = [name for handle, name in names.items() if handle not in keys]
    if not found:
        raise ValueError(f"{prefix!r} has no value for any variable of the model. Its weights were another model's.")
    return LoadStatus(prefix, tuple(variable.name for variable, _ in found), tuple(missing))


def _give(variable: Any, reader: Any, key: str, noted: NotedFiles) -> None:
    # The reader opens the files of values when it first needs them.
    if not set_initial_value(variable, lambda: noted.read(lambda: reader.get_tensor(key))):
        variable.assign(reader.get_tensor(key))


def write(model: SplitModel, prefix: str, place: str) -> None:
    """Writes the weights of a model as `tf_keras.Model.save_weights` does. Other ranks' variables must be readable.

    Args:
        model: a distributed model that has run a step.
        prefix: prefix of the files to write.
        place: the prefix that `put_in_place` will give them. No file gets the name of an existing one.
    """
    root = model._smp_keras_model
    with save_structure():
        tf.train.Checkpoint(root=root).write(prefix)
    replace_values(prefix, root, adapter.layers().variables_of(model), place)


def replace_values(prefix: str, root: Any, weights: Sequence[Any], place: str = "") -> None:
    """Puts the present values into a checkpoint that was written without some. It never holds two foreign ones.

    Args:
        prefix: of the checkpoint's files.
        root: the object that was saved.
        weights: variables of the object.
        place: the prefix that its files will be given, where no file may get the name of an existing one; "" for the
            present prefix.

    Raises:
        StepError: the object graph lacks a variable, or every number of files is taken.
    """
    written = tf.train.load_checkpoint(prefix)
    graph = written.get_tensor(_GRAPH_KEY)
    keys = {id(variable.handle): key for variable, key in _matched(root, graph)}
    # Tables and the like, which are not among the weights.
    others = sorted({*written.get_variable_to_shape_map()} - {*keys.values(), _GRAPH_KEY})
    missing = [variable.name for variable in weights if id(variable.handle) not in keys]
    if missing:
        raise StepError(f"TensorFlow's object graph of the model lacks {', '.join(missing)}; it cannot be saved so.")
    own = [v for v in weights if not store.is_remote(v)]
    remote = [v for v in weights if store.is_remote(v)]
    here: list[_Tensor] = [
        (_GRAPH_KEY, lambda: tf.constant(graph)),
        *((key, functools.partial(written.get_tensor, key)) for key in others),
        *((keys[id(v.handle)], functools.partial(tf.convert_to_tensor, v)) for v in own),
    ]
    first = _cut(here, len(remote), place)
    shards: list[str] = []
    for number, tensors in enumerate(first):
        shards.append(f"{prefix}-part-own-{number}")
        tf.raw_ops.SaveV2(
            prefix=shards[-1],
            tensor_names=[key for key, _ in tensors],
            shape_and_slices=[""] * len(tensors),
            tensors=[value() for _, value in tensors],
        )
    for number, variable in enumerate(remote):
        shards.append(f"{prefix}-part-{number}")
        tf.raw_ops.SaveV2(
            prefix=shards[-1],
            tensor_names=[keys[id(variable.handle)]],
            shape_and_slices=[""],
            tensors=[variable.read_value()],
        )
    for path in files_of(prefix):
        os.remove(path)
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=shards, destination_prefix=prefix, delete_old_dirs=False)


def _cut(tensors: list[_Tensor], others: int, place: str) -> list[list[_Tensor]]:
    """Returns the tensors divided into few files, such that no existing checkpoint there has the same number of them.

    Args:
        tensors: tensors that may share files.
        others: how many more files there will be.
        place: the prefix that the files will be given; "" where no files have it.
    """
    taken = (
        {int(name.rpartition("-of-")[2]) for name in files_of(place) if not name.endswith(".index")} if place else ()
    )
    for count in range(1, len(tensors) + 1):
        if count + others not in taken:
            return [*([tensor] for tensor in tensors[: count - 1]), tensors[count - 1 :]]
    raise StepError(
        f"Saves that were killed have left files with values under every name that a new one could take next to "
        f"{place!r}. Save the weights under another name."
    )


def put_in_place(built: str, place: str) -> None:
    """Gives the files of a checkpoint their names for good, and then deletes those of an earlier one.

    The rename of the index decides. The earlier checkpoint has another number of files, so its files have other names,
    and it is whole until then. Where this fails, it is unchanged.

    Args:
        built: the prefix that the files have, in a folder of this process.
        place: the prefix that they will have.

    Raises:
        OSError: they cannot be synced or renamed.
    """
    folder = os.path.dirname(os.path.abspath(place))
    *values, index = [(file, place + file.removeprefix(built)) for file in files_of(built)]
    stale = [file for file in files_of(place) if file != index[1]]
    for file, _ in (*values, index):
        durable_files.sync(file)
    earlier = _content(index[1])
    try:
        for file, name in values:
            os.rename(file, name)
        durable_files.sync(folder)
        os.replace(*index)
        durable_files.sync(folder)
        # This file names the latest checkpoint of a folder. TensorFlow's own function for writing it is deprecated.
        latest = tf.compat.v1.train.generate_checkpoint_state_proto(folder, os.path.basename(place))
        durable_files.write_file(os.path.join(folder, "checkpoint"), str(latest))
    except BaseException:
        _take_back(index, values, earlier)
        raise
    for file in stale:
        durable_files.remove(file)


def _take_back(index: tuple[str, str], values: Sequence[tuple[str, str]], earlier: bytes | None) -> None:
    """Puts back the earlier index, and deletes the files with values that belong to the other one."""
    if not os.path.exists(index[0]):
        if earlier is None:
            os.remove(index[1])
        else:
            durable_files.write_file(index[1], earlier)
    for file, name in values:
        if not os.path.exists(file):
            durable_files.remove(name)


def _content(path: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read()
    return None


def files_of(prefix: str) -> list[str]:
    """Returns the files of a checkpoint, its index last."""
    folder, name = os.path.split(prefix)
    named = re.compile(rf"{re.escape(name)}\.(index|data-[0-9]+-of-[0-9]+)")
    found = filter(named.fullmatch, os.listdir(folder or "."))
    return [os.path.join(folder, f) for f in sorted(found)]


def _matched(root: Any, serialized: bytes) -> Iterator[tuple[Any, str]]:
    """Yields the variables below a root for which an object graph has a value, each with the key of the value."""
    nodes = trackable_object_graph_pb2.TrackableObjectGraph.FromString(serialized).nodes
    view = tf.train.TrackableView(root)
    waiting, seen = deque([(root, 0)]), {0}
    while waiting:
        here, number = waiting.popleft()
        if isinstance(here, tf.Variable):
            if nodes[number].attributes:
                yield here, nodes[number].attributes[0].checkpoint_key
            continue
        children = view.children(here)
        for child in nodes[number].children:
            if child.local_name in children and child.node_id not in seen:
                seen.add(child.node_id)
                waiting.append((children[child.local_name], child.node_id))

"""Weights in the files of `tf.train.Checkpoint`: found by their place in the model, read and written one at a time.

What a checkpoint holds is found as TensorFlow does it, by walking the model and the object graph in the file together:

    model ──hidden──▶ layer ──kernel──▶ variable          the variable's value in the file
    node 0 ──hidden──▶ node 3 ──kernel──▶ node 8 ──────▶  "hidden/kernel/.ATTRIBUTES/VARIABLE_VALUE"
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from smp_tf import variables
from smp_tf.errors import StepError
from smp_tf.model_context import save_structure
from smp_tf.wrapped_model import keras_model_of

if TYPE_CHECKING:
    from smp_tf.model import DistributedModel

_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"


@dataclass(frozen=True)
class LoadStatus:
    """What `load_weights` of a checkpoint found; named like what `tf.train.Checkpoint.restore` returns.

    Args:
        path: what was read.
        loaded: names of the variables that were in it.
        missing: names of the variables that were not.
    """

    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Raise unless every variable of the model was found."""
        if self.missing:
            raise AssertionError(f"{self.path!r} has no value for {', '.join(self.missing)}.")
        return self

    def assert_consumed(self) -> LoadStatus:
        """Raise unless every variable of the model was found."""
        return self.assert_existing_objects_matched()

    def assert_nontrivial_match(self) -> LoadStatus:
        """Raise unless a variable of the model was found."""
        if not self.loaded:
            raise AssertionError(f"{self.path!r} has no value for any variable of the model.")
        return self

    def expect_partial(self) -> LoadStatus:
        """Say that a part of the model is enough; nothing is ever said of the rest."""
        return self


def prefix_of(path: str) -> str | None:
    """The prefix of the checkpoint files that a path means; None where there are none.

    Args:
        path: such a prefix, or the folder of a SavedModel.
    """
    for prefix in (path, os.path.join(path, "variables", "variables")):
        if os.path.isfile(f"{prefix}.index"):
            return prefix
    return None


def read(root: Any, prefix: str) -> LoadStatus:
    """Give the variables of a model the values in a checkpoint; only those stored here are read.

    Args:
        root: the model as it was saved.
        prefix: of the checkpoint's files.

    Returns:
        What was found.

    Raises:
        ValueError: a value has another shape than its variable, or there is a value for no variable of the model.
    """
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    keys = {id(variable.handle): key for variable, key in _matched(root, reader.get_tensor(_GRAPH_KEY))}
    found = [(variable, keys[id(variable.handle)]) for variable in root.variables if id(variable.handle) in keys]
    for variable, key in found:
        if not variable.shape.is_compatible_with(shapes[key]):
            raise ValueError(
                f"Variable {variable.name!r} has shape {tuple(variable.shape)}, but its value in {prefix!r} has shape "
                f"{tuple(shapes[key])}."
            )
    for variable, key in found:
        if not variables.is_remote(variable):
            _give(variable, reader, key)
    names = {id(variable.handle): variable.name for variable in root.variables}
    missing = [name for handle, name in names.items() if handle not in keys]
    if not found:
        raise ValueError(f"{prefix!r} has no value for any variable of the model. Its weights were another model's.")
    return LoadStatus(prefix, tuple(variable.name for variable, _ in found), tuple(missing))


def _give(variable: Any, reader: Any, key: str) -> None:
    if not variables.set_initial_value(variable, lambda: reader.get_tensor(key)):
        variable.assign(reader.get_tensor(key))


def write(model: DistributedModel, prefix: str) -> None:
    """Write the weights of a model as `tf_keras.Model.save_weights` does; variables of other ranks must be readable.

    Args:
        model: a distributed model that has run a step.
        prefix: of the files to write.
    """
    root = keras_model_of(model)
    with save_structure():
        tf.train.Checkpoint(root=root).write(prefix)
    replace_values(prefix, root, list(model.variables))


def replace_values(prefix: str, root: Any, weights: Sequence[Any]) -> None:
    """Put the values of now into a checkpoint that was written without some, never holding two foreign ones.

    Args:
        prefix: of the checkpoint's files.
        root: what was saved.
        weights: its variables.
    """
    written = tf.train.load_checkpoint(prefix)
    graph = written.get_tensor(_GRAPH_KEY)
    keys = {id(variable.handle): key for variable, key in _matched(root, graph)}
    # Tables and the like, which have no part in the weights.
    others = sorted({*written.get_variable_to_shape_map()} - {*keys.values(), _GRAPH_KEY})
    missing = [variable.name for variable in weights if id(variable.handle) not in keys]
    if missing:
        raise StepError(f"TensorFlow's object graph of the model lacks {', '.join(missing)}; it cannot be saved so.")
    own = [v for v in weights if not variables.is_remote(v)]
    shards = [f"{prefix}-part-own"]
    tf.raw_ops.SaveV2(
        prefix=shards[0],
        tensor_names=[_GRAPH_KEY, *others, *(keys[id(v.handle)] for v in own)],
        shape_and_slices=[""] * (1 + len(others) + len(own)),
        tensors=[tf.constant(graph), *map(written.get_tensor, others), *map(tf.convert_to_tensor, own)],
    )
    for number, variable in enumerate(v for v in weights if variables.is_remote(v)):
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


def files_of(prefix: str) -> list[str]:
    """The files of a checkpoint, its index last."""
    folder, name = os.path.split(prefix)
    found = [f for f in os.listdir(folder or ".") if f == f"{name}.index" or f.startswith(f"{name}.data-")]
    return [os.path.join(folder, f) for f in sorted(found)]


def _matched(root: Any, serialized: bytes) -> Iterator[tuple[Any, str]]:
    """The variables below a root that an object graph has a value for, each with the key of that value."""
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

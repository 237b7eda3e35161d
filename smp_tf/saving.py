"""Save a whole model from its parts: the structure by Keras, the values streamed to one rank, one tensor at a time.

every rank comes to the beginning: a rank that is in a step instead is an error within seconds
writer                                     owners of other stages
structure without values ──▶ folder
own values ──▶ shard 0
recv one, write its shard, free it  ◀────  send one
merge the shards' indices, rename the folder
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow.core.protobuf import trackable_object_graph_pb2

from smp_tf import runtime
from smp_tf.control import barrier, tag_of
from smp_tf.errors import StepError
from smp_tf.model import DistributedModel, WrappedModel, save_structure
from smp_tf.ops.transport import Transport
from smp_tf.topology import CommGroup

_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_WRITER = 0


def save_model(model: DistributedModel, path: str | os.PathLike[str]) -> None:
    """Write the whole, unsplit model as a SavedModel that tf_keras loads without smp_tf.

    Args:
        model: a distributed model that has run a step.
        path: folder to write; an earlier model there is replaced once the new one is complete.

    Raises:
        StepError: the model has not run a step yet, or the path asks for a format this function does not write.
        RankMismatchError: not every rank saves it.
    """
    path = os.fspath(path)
    if path.endswith((".keras", ".h5", ".hdf5")):
        raise StepError(
            f"save_model writes a SavedModel, a folder. Received: path={path!r}. Leave out the file extension; "
            f"tf_keras.models.load_model(path) reads the folder."
        )
    if not model.built:
        raise StepError(f"Model {model.name!r} has not run a step yet, so there is nothing to save.")
    running = runtime.current()
    weights = list(model.variables)
    stage_ranks = running.topology.grid.members(CommGroup.PP_GROUP, _WRITER)
    holders = [_holder(model, variable, stage_ranks) for variable in weights]
    rank = running.topology.rank
    # Nothing is written or sent before all have come: a rank that never comes may wait in a step for this one.
    barrier(name=f"the beginning of saving model {model.name!r}")
    if rank == _WRITER:
        _write(model, path, weights, holders)
    else:
        for number, (variable, holder) in enumerate(zip(weights, holders, strict=True)):
            if holder == rank:
                _transport().send_bytes(_WRITER, tag_of("saved value", number), _as_bytes(variable))
    barrier(name=f"the end of saving model {model.name!r}")


def _holder(model: DistributedModel, variable: Any, stage_ranks: Sequence[int]) -> int:
    """The rank whose value of a variable is saved."""
    if model._smp_store.leaves_to_script(variable):
        return _WRITER
    state = model._smp_store.state(variable)
    if state is None or state.owner is None:
        raise StepError(
            f"Model {model.name!r} has not run a step yet, so its variable {variable.name!r} has no value to save."
        )
    return stage_ranks[state.owner]


def _write(model: DistributedModel, path: str, weights: list[Any], holders: list[int]) -> None:
    saved = model.wrapped if isinstance(model, WrappedModel) else model
    building = f"{path}.writing-{secrets.token_hex(4)}"
    try:
        with save_structure():
            tf_keras.models.save_model(saved, building, save_format="tf", include_optimizer=False)
        _write_values(os.path.join(building, "variables", "variables"), weights, holders)
        _put_in_place(building, path)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_values(prefix: str, weights: list[Any], holders: list[int]) -> None:
    """Replace the values in a SavedModel's tensor bundle, without ever holding two foreign ones."""
    graph = tf.train.load_checkpoint(prefix).get_tensor(_GRAPH_KEY)
    keys = _keys(graph, len(weights))
    rank = runtime.current().topology.rank
    own = [number for number, holder in enumerate(holders) if holder == rank]
    shards = [f"{prefix}-part-own"]
    tf.raw_ops.SaveV2(
        prefix=shards[0],
        tensor_names=[_GRAPH_KEY, *(keys[n] for n in own)],
        shape_and_slices=[""] * (1 + len(own)),
        tensors=[tf.constant(graph), *(tf.convert_to_tensor(weights[n]) for n in own)],
    )
    for number, holder in enumerate(holders):
        if holder == rank:
            continue
        value = _from_bytes(_transport().recv_bytes(holder, tag_of("saved value", number)), weights[number])
        shards.append(f"{prefix}-part-{number}")
        tf.raw_ops.SaveV2(prefix=shards[-1], tensor_names=[keys[number]], shape_and_slices=[""], tensors=[value])
    for name in os.listdir(os.path.dirname(prefix)):
        if name.startswith("variables.") and "-part-" not in name:
            os.remove(os.path.join(os.path.dirname(prefix), name))
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=shards, destination_prefix=prefix, delete_old_dirs=False)


def _transport() -> Transport:
    transport = runtime.current().transport
    assert transport is not None, "a weight that another rank holds means there is another rank"
    return transport


def _as_bytes(variable: Any) -> np.ndarray:
    return np.ascontiguousarray(variable.numpy()).reshape(-1).view(np.uint8)


def _from_bytes(data: memoryview, variable: Any) -> tf.Tensor:
    kind = variable.dtype.base_dtype
    return tf.constant(np.frombuffer(data, kind.as_numpy_dtype).reshape(variable.shape), kind)


def _keys(serialized: bytes, count: int) -> list[str]:
    """The key of every variable, in the order of `model.variables`, from a saved object graph."""
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(serialized)
    children = {child.local_name: child.node_id for child in graph.nodes[0].children}
    listed = {child.local_name: child.node_id for child in graph.nodes[children["variables"]].children}
    return [graph.nodes[listed[str(number)]].attributes[0].checkpoint_key for number in range(count)]


def _put_in_place(building: str, path: str) -> None:
    if os.path.isdir(path):
        old = f"{building}.old"
        os.rename(path, old)
        os.rename(building, path)
        shutil.rmtree(old)
    else:
        os.rename(building, path)

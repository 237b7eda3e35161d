"""Fetches weights that other ranks store, one at a time, for the one rank that writes a file, or for all.

writer (rank 0)                                     owners of other stages
reads a foreign variable ── "number 7" ──▶          sends the value of number 7
uses the value, frees it ◀───── value ─────         waits for the next number
all is written ──────────── the end ─────▶          goes on
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from smp_tf.errors import RankMismatchError, StepError
from smp_tf.job import runtime
from smp_tf.job.channel import tag_of
from smp_tf.job.exchange import allgather_json, barrier
from smp_tf.keras import adapter
from smp_tf.ops.transport import Transport
from smp_tf.partition.mesh import CommGroup
from smp_tf.variables import assigned_values, foreign_values

if TYPE_CHECKING:
    from smp_tf.variables.models import SplitModel

WRITER = 0


def write_with_all_weights(model: SplitModel, doing: str, write: Callable[[], None]) -> None:
    """Runs on one rank a function that may read every weight of a model. All ranks must call this.

    No rank holds more than one foreign weight at a time, unless the function keeps them.

    Args:
        model: a distributed model that has run a step.
        doing: words for what is done, to follow "the beginning of"; the same on all ranks.
        write: what rank 0 runs.

    Raises:
        StepError: the model has not run a step yet, or writing failed on rank 0.
        RankMismatchError: not every rank calls this.
    """
    weights = adapter.layers().variables_of(model)
    holders = _holders(model, weights)
    rank = runtime.current().topology.rank
    # Nothing is written or sent before all have come, since a rank that never comes may wait in a step for this one.
    assigned_values.compare(allgather_json(assigned_values.left_out(), name=f"the beginning of {doing}"))
    failure: Exception | None = None
    if rank == WRITER:
        try:
            with _fetching(weights, holders):
                write()
        except Exception as error:
            failure = error
    elif rank in holders:
        _serve(weights)
    cause = None if failure is None else f"{type(failure).__name__}: {failure}"
    causes = allgather_json(cause, name=f"the end of {doing}")
    if failure is not None:
        raise failure
    if causes[WRITER] is not None:
        raise StepError(f"Rank {WRITER} failed at {doing}: {causes[WRITER]}")


def owner_ranks(model: SplitModel, weights: Sequence[Any], rank: int) -> list[int | None]:
    """Returns the rank of a replica that stores each of a model's weights; None for a weight that every rank stores.

    Args:
        model: a distributed model that has run a step.
        weights: some of the model's variables.
        rank: a rank of the replica.

    Raises:
        StepError: the model has not run a step yet.
    """
    stage_ranks = runtime.current().topology.mesh.members(CommGroup.PP_GROUP, rank)
    stages = [model._layout_of(weight).stage for weight in weights]
    return [None if stage is None else stage_ranks[stage] for stage in stages]


def _holders(model: SplitModel, weights: Sequence[Any]) -> list[int]:
    return [WRITER if owner is None else owner for owner in owner_ranks(model, weights, WRITER)]


@contextlib.contextmanager
def _fetching(weights: Sequence[Any], holders: Sequence[int]) -> Iterator[None]:
    numbers = {id(variable.handle): number for number, variable in enumerate(weights)}

    def fetch(variable: Any) -> tf.Tensor:
        number = numbers[id(variable.handle)]
        _tell(holders[number], number)
        return as_tensor(transport().recv_bytes(holders[number], _VALUE), variable)

    try:
        with foreign_values.fetched_by(fetch):
            yield
    finally:
        for holder in sorted({*holders} - {WRITER}):
            _tell(holder, None)


def _serve(weights: Sequence[Any]) -> None:
    while (number := json.loads(bytes(transport().recv_bytes(WRITER, _REQUEST)))) is not None:
        transport().send_bytes(WRITER, _VALUE, as_bytes(weights[number]))


_REQUEST, _VALUE = tag_of("wanted weight"), tag_of("value of a weight")


def _tell(holder: int, number: int | None) -> None:
    transport().send_bytes(holder, _REQUEST, json.dumps(number).encode())


def meet(doing: str) -> None:
    """Returns when all ranks of the replica have come to read a weight.

    Args:
        doing: words for what they do, the same on all of them.

    Raises:
        RankMismatchError: not every rank comes.
    """
    try:
        barrier(CommGroup.PP_GROUP, name=doing)
    except RankMismatchError as error:
        raise RankMismatchError(
            f"{error} Every rank must read it. Under fit, a callback whose class is one of Keras's TensorBoard, "
            f"CSVLogger, RemoteMonitor or ProgbarLogger, or is derived from these, runs on rank 0 alone: read weights "
            f"in a callback derived from tf_keras.callbacks.Callback."
        ) from None


def told_by(owner: int, ranks: Sequence[int], like: Any, value: Callable[[], Any]) -> np.ndarray:
    """Returns one rank's value on all ranks of a group. All of them call it.

    Args:
        owner: the rank that has it.
        ranks: the group.
        like: an object with the value's shape and dtype.
        value: returns the value, on that rank.
    """
    rank = runtime.current().topology.rank
    if rank != owner:
        return as_array(transport().recv_bytes(owner, _TOLD), like)
    own: np.ndarray = value()
    for other in ranks:
        if other != owner:
            transport().send_bytes(other, _TOLD, as_bytes(own))
    return own


_TOLD = tag_of("weight told to all")


def transport() -> Transport:
    """Returns the connection to the other ranks, if there are any."""
    found = runtime.current().transport
    assert found is not None, "a weight that another rank holds means there is another rank"
    return found


def as_bytes(value: Any) -> np.ndarray:
    """Returns the memory of a variable, or of an array, in the form in which it travels."""
    array = value.numpy() if tf.is_tensor(value) else value
    if isinstance(array, bytes) or array.dtype == object:
        array = np.frombuffer(tf.io.serialize_tensor(tf.constant(array, tf.string)).numpy(), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def as_array(data: memoryview, like: Any) -> np.ndarray:
    """Returns the array that `as_bytes` was made from, with the shape and type of a variable."""
    if like.dtype.base_dtype == tf.string:
        return np.array(tf.io.parse_tensor(bytes(data), tf.string).numpy(), object).reshape(like.shape)
    return np.frombuffer(data, like.dtype.base_dtype.as_numpy_dtype).reshape(like.shape)


def as_tensor(data: memoryview, like: Any) -> tf.Tensor:
    """Returns the tensor that `as_bytes` was made from, with the shape and type of a variable."""
    return tf.constant(as_array(data, like), like.dtype.base_dtype)

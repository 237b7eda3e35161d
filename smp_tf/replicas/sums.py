"""Sums over replicas, that is over the ranks that hold the same stage, once per step and dtype."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.collectives import wire_types
from smp_tf.collectives.interface import collectives
from smp_tf.config.keys import ONE_BIT
from smp_tf.job import runtime
from smp_tf.pipeline.run.host import HOST
from smp_tf.pipeline.run.reduction import Bucket, Sums
from smp_tf.replicas.equal_parts import Exchange, sums_in_parts
from smp_tf.replicas.reduce_scatter import Receiver, Route, sums_at_receivers
from smp_tf.replicas.two_byte_floats import COMPRESSED
from smp_tf.variables import assigned_values

#: The most elements of tensors in a row, since they are counted as int32.
_MOST_ELEMENTS = 1 << 30
#: The most bytes of one gradient that a replica receives from all others together.
_MOST_RECEIVED = 256 << 20
#: Types whose sums are made in equal parts on the host, and the forms in which they are sent.
IN_PARTS = {tf.float32: None, tf.float64: None, tf.bfloat16: "bf16", tf.float16: "fp16"}


def reduction_name(known_as: str) -> str:
    """Returns the name under which the gradients of a step function are reduced, the same for all of its programs.

    The name needs no program number, since replicas with batches of other sizes run programs of other numbers.

    Args:
        known_as: what the step function is known by on all ranks.
    """
    return f"smp_gradients_{re.sub('[^A-Za-z0-9_.]', '_', known_as)}"


def sum_over_replicas(
    tensors: Sequence[tf.Tensor],
    name: str,
    *,
    compression: str | None = None,
    offload: bool = False,
    handles: Sequence[Any] = (),
) -> list[tf.Tensor]:
    """Returns the sums over the replicas of tensors that every rank of this stage's group has.

    Args:
        tensors: dense tensors, equal in number, shapes and types on every rank of the group.
        name: unique name of the operation, equal on those ranks.
        compression: how tensors of a type in `wire_compression.COMPRESSED` are sent; None for as they are.
        offload: whether to add them up in the host's memory, and those of a type in `IN_PARTS` in parts of equal bytes.
        handles: resource tensors of variables. The op comes after their earlier uses, and ends before later ones.

    Returns:
        The sums. With one replica they are the tensors themselves.
    """
    running = runtime.current()
    replicas = running.topology.replicas
    if not tensors or replicas == 1:
        return list(tensors)
    ways = [_way(t.dtype, compression, offload) for t in tensors]
    sums: dict[int, tf.Tensor] = {}
    with tf.device(HOST) if offload else contextlib.nullcontext():
        for way in dict.fromkeys(ways):
            alike = [i for i, other in enumerate(ways) if other == way]
            given = [tensors[i] for i in alike]
            named = name if way is None else f"{name}_{way.name}"
            if way is None or _elements(given) > _MOST_ELEMENTS:
                found = collectives().all_reduce(given, running.process_sets.dp, named, handles=handles)
            else:
                found = sums_in_parts(given, way.kind, exchange_of(replicas, named, handles))
            sums.update(zip(alike, found, strict=True))
    return [sums[i] for i in range(len(tensors))]


def _elements(tensors: Sequence[tf.Tensor]) -> int:
    """Returns how many elements tensors have together, as far as it is known before they exist."""
    return sum(tensor.shape.num_elements() or 0 for tensor in tensors)


@dataclass(frozen=True)
class _InParts:
    """How tensors of a type are summed in equal parts.

    Args:
        name: name for the operation.
        kind: the form in which they are sent, as `equal_parts.sums_in_parts` takes it.
    """

    name: str
    kind: str | None


def _way(dtype: tf.DType, compression: str | None, offload: bool) -> _InParts | None:
    """Returns how tensors of a type are summed in equal parts; None where Horovod sums them."""
    if compression is not None and dtype in COMPRESSED:
        return _InParts(compression, compression)
    return _InParts(dtype.name, IN_PARTS[dtype]) if offload and dtype in IN_PARTS else None


def sum_gradients(tensors: Sequence[tf.Tensor], name: str, *, handles: Sequence[Any] = ()) -> list[tf.Tensor]:
    """Returns the sums of gradients over the replicas, sent and added up as the configuration says.

    Args:
        tensors: dense tensors, equal in number, shapes and types on every rank of the group.
        name: unique name of the operation, equal on those ranks.
        handles: resource tensors of variables. The op comes after their earlier uses, and ends before later ones.

    Returns:
        The sums.
    """
    config = runtime.current().config
    kind = None if config.gradient_compression == ONE_BIT else config.gradient_compression
    return sum_over_replicas(tensors, name, compression=kind, offload=config.gradient_offload, handles=handles)


@dataclass(frozen=True, eq=False)
class BucketSums:
    """Sums the buckets of a step's gradients over the replicas.

    Args:
        known_as: what the step function is known by, on all ranks.
        receivers: by output, the replica that alone gets a gradient's sum, or the rows that each gets. Other gradients
            go to all replicas.
    """

    known_as: str
    receivers: Mapping[int, Receiver]

    def __call__(self, sums: Sequence[tf.Tensor], bucket: Bucket) -> Sums:
        """Returns the sums of a bucket over the replicas.

        Args:
            sums: the gradients' sums over the microbatches.
            bucket: which bucket.
        """
        to = [self.receivers.get(position) for position in bucket.positions]
        return Sums(*sum_gradients_at(sums, to, f"{reduction_name(self.known_as)}_{bucket.number}"))


def sum_gradients_at(
    tensors: Sequence[tf.Tensor], receivers: Sequence[Receiver | None], name: str
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Sums gradients over the replicas, each for one replica or by rows, and sent as the configuration says.

    Args:
        tensors: dense tensors, alike on every rank of the group. Those with a receiver are of a type in `IN_PARTS`.
        receivers: who gets the sum of each tensor; None for all.
        name: unique name of the operation, equal on the ranks of the group.

    Returns:
        The sums that this replica gets, in order; and the tensors that it has received, to wait for.
    """
    running = runtime.current()
    config, replica = running.config, running.topology.replica
    replicas = running.topology.replicas
    ways = [
        None if receiver is None or _is_large(t, receiver) else _way(t.dtype, config.gradient_compression, True)
        for t, receiver in zip(tensors, receivers, strict=True)
    ]
    sums: dict[int, tf.Tensor] = {}
    there: list[tf.Tensor] = []
    for way in dict.fromkeys(ways):
        named = name if way is None else f"{name}_{way.name}"
        alike = [i for i, other in enumerate(ways) if other == way]
        whole = [i for i in alike if not _is_in_rows(receivers[i])]
        count = sum(receiver.elements for i in whole if (receiver := receivers[i]) is not None)
        if way is None or count * replicas > _MOST_ELEMENTS:
            found = sum_gradients([tensors[i] for i in whole], named)
            there += found
            sums.update((i, t) for i, t in zip(whole, found, strict=True) if _is_for(replica, receivers[i]))
            alike = [i for i in alike if i not in whole]
        if way is None or not alike:
            continue
        to = [receiver for i in alike if (receiver := receivers[i]) is not None]
        found, received = sums_at_receivers([tensors[i] for i in alike], to, way.kind, _route(named))
        there += received
        here = [i for i in alike if _is_for(replica, receivers[i])]
        sums.update(zip(here, found, strict=True))
    return [sums[i] for i in sorted(sums)], there


def _is_large(tensor: tf.Tensor, receiver: Receiver) -> bool:
    """Returns whether a gradient is summed in a ring, since its receiver would hold a copy of every replica's."""
    replicas = runtime.current().topology.replicas
    return not _is_in_rows(receiver) and receiver.elements * tensor.dtype.size * replicas > _MOST_RECEIVED


def _is_in_rows(receiver: Receiver | None) -> bool:
    """Returns whether each replica gets rows of a sum."""
    return receiver is not None and receiver.spread.only is None


def _is_for(replica: int, receiver: Receiver | None) -> bool:
    """Returns whether a replica gets a sum, or rows of one."""
    return receiver is None or receiver.gets(replica)


def _route(name: str) -> Route:
    running = runtime.current()

    def alltoall(vector: tf.Tensor, splits: tf.Tensor, number: int) -> tf.Tensor:
        return collectives().all_to_all(vector, running.process_sets.dp, f"{name}_to_{number}", splits=splits)

    return Route(running.topology.replicas, running.topology.replica, alltoall)


def exchange_of(replicas: int, name: str, handles: Sequence[Any]) -> Exchange:
    """Returns how parts travel among the replicas of this rank's stage.

    Args:
        replicas: number of replicas.
        name: unique name of the operations, equal on the ranks of the group.
        handles: resource tensors of variables. The op comes after their earlier uses, and ends before later ones.
    """
    group = runtime.current().process_sets.dp

    def alltoall(rows: tf.Tensor) -> tf.Tensor:
        return collectives().all_to_all(rows, group, f"{name}_parts", handles=handles)

    def allgather(row: tf.Tensor) -> tf.Tensor:
        return collectives().all_gather(row, group, f"{name}_sums", handles=handles)

    return Exchange(replicas, alltoall, allgather)


def broadcast_over_replicas(variables: Sequence[tf.Variable], root: int, name: str) -> None:
    """Gives variables of this rank their values on another replica. Every replica calls it, eagerly.

    Args:
        variables: the variables, in the same order on all replicas.
        root: world rank of the rank whose values are taken.
        name: unique name of the operation, equal on all replicas.
    """
    running = runtime.current()
    if running.topology.replicas == 1:
        return
    for variable in variables:
        if variable.dtype != tf.string:
            wire_types.moved_as(variable.dtype, f"variable {variable.name!r}")
    with assigned_values.unnoted():
        for number, variable in enumerate(variables):
            value = variable.read_value()
            variable.assign((_text_of if value.dtype == tf.string else _value_of)(value, root, f"{name}_{number}"))


def _value_of(value: tf.Tensor, root: int, name: str) -> tf.Tensor:
    """Returns another replica's value of a tensor, eagerly."""
    return collectives().broadcast(value, root, runtime.current().process_sets.dp, name)


def _text_of(value: tf.Tensor, root: int, name: str) -> tf.Tensor:
    """Returns another replica's value of texts, whose lengths may differ."""
    own = tf.io.decode_raw(tf.io.serialize_tensor(value), tf.uint8)
    length = _value_of(tf.size(own), root, f"{name}_length")
    if runtime.current().topology.rank != root:
        own = tf.zeros([length], tf.uint8)
    return tf.io.parse_tensor(_value_of(own, root, name).numpy().tobytes(), tf.string)


def scaled(value: Any, factor: float) -> Any:
    """Returns a tensor or sparse slices times a number; the same object where that is 1."""
    if factor == 1.0:
        return value
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(value.values, factor), value.indices, value.dense_shape)
    tensor = tf.convert_to_tensor(value)
    return tensor * tf.constant(factor, tensor.dtype)

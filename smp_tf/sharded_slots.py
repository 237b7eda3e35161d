"""Each replica keeps a share of its stage's optimizer slots, updates those weights, and the others take the values.

    stage's weights    replica 0                      replica 1
    kernel             slots, update ── new value ──▶ takes it
    embedding          takes it ◀────── new value ─── slots, update

All replicas have the averaged gradients of all weights, so whatever a script makes of them is as without shares. An
optimizer is handed only the weights of this rank's share (`keras_adapter`), and makes slots for no others. What it has
written is then gathered, in buckets, as bytes: replicas stay equal to the last bit.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20, section 5.1
(stage 1, of whole variables).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from smp_tf import data_parallel, optimizer_state, runtime, variables
from smp_tf.lifecycle import on_shutdown
from smp_tf.partition.slot_shares import share_out
from smp_tf.pipeline.reduction import MOST_BYTES

#: So many buckets are on their way at the same time: each needs memory for its bytes.
_AT_ONCE = 2


class _Loads:
    """Bytes of weights whose slots each replica of this rank's stage keeps."""

    by_replica: list[int] = []  # noqa: RUF012


def are_shared() -> bool:
    """Whether the replicas share the optimizer's slots among them."""
    running = runtime.current_or_none()
    return running is not None and running.config.shard_optimizer_state and running.topology.dp_size > 1


def count() -> int:
    """Among how many replicas slots are shared; 1 where all keep them."""
    return runtime.current().topology.dp_size if are_shared() else 1


def share(placed: Iterable[Any]) -> None:
    """Decide which replica keeps the slots of variables that this rank stores from now on.

    Args:
        placed: variables of models, the same in the same order on every replica.
    """
    if not are_shared():
        return
    if not _Loads.by_replica:
        _Loads.by_replica = [0] * runtime.current().topology.dp_size
        on_shutdown(_forget)
    new = {id(variable.handle): variable for variable in placed if variable.trainable}
    # Several models may use one.
    todo = [variable for variable in new.values() if _placement(variable).replica is None]
    sizes = [_nbytes(variable) for variable in todo]
    for variable, size, replica in zip(todo, sizes, share_out(sizes, _Loads.by_replica), strict=True):
        _placement(variable).replica = replica
        _Loads.by_replica[replica] += size


def _forget() -> None:
    _Loads.by_replica = []
    for variable in variables.of_models():
        _placement(variable).replica = None


def is_updated_elsewhere(variable: Any) -> bool:
    """Whether another replica keeps the optimizer's slots of a variable, and updates it."""
    replica = replica_of(variable)
    return replica is not None and replica != runtime.current().topology.dp_rank


def replica_of(variable: Any) -> int | None:
    """The replica that keeps the slots of a variable which this rank stores; None where all replicas do."""
    if not are_shared() or variables.store_of(variable) is None:
        return None
    return _placement(variable).replica


def of_shares() -> set[int]:
    """The slots that no other replica of this rank's stage has, by `id` of their handles."""
    if not are_shared():
        return set()
    shared = [variable for variable in variables.of_models() if replica_of(variable) is not None]
    return {
        id(slot.handle)
        for optimizer in optimizer_state.in_use()
        for _, _, slot in optimizer_state.slots(optimizer, shared)
    }


def gather(changed: Iterable[Any]) -> None:
    """Give every replica what the others have made of their shares; every replica of this rank's stage calls it.

    Args:
        changed: variables, the same in the same order on every replica; those that no replica updates alone are left
            as they are.
    """
    shared = list({id(v.handle): v for v in changed if replica_of(v) is not None}.values())
    if not shared:
        return
    name = data_parallel.next_name("smp_weights")
    done: list[list[tf.Operation]] = []
    for number, bucket in enumerate(_buckets(shared)):
        before = done[number - _AT_ONCE] if number >= _AT_ONCE else []
        with tf.control_dependencies(before):
            done.append(_gather_bucket(bucket, f"{name}_{number}"))


def _buckets(shared: Sequence[Any]) -> list[list[Any]]:
    """Variables in groups of limited bytes, in which every replica has about as much as the others."""
    replicas = runtime.current().topology.dp_size
    queues: list[list[Any]] = [[v for v in shared if replica_of(v) == replica] for replica in range(replicas)]
    share_of_bucket = MOST_BYTES / replicas
    buckets: list[list[Any]] = []
    for queue in queues:
        filled, number = 0.0, 0
        for variable in queue:
            if number == len(buckets):
                buckets.append([])
            buckets[number].append(variable)
            filled += _nbytes(variable)
            if filled >= share_of_bucket:
                filled, number = 0.0, number + 1
    return buckets


def _gather_bucket(bucket: Sequence[Any], name: str) -> list[tf.Operation]:
    """Exchange the values of variables; gives ops that have run when all have them."""
    import horovod.tensorflow as hvd

    running = runtime.current()
    own = [variable for variable in bucket if replica_of(variable) == running.topology.dp_rank]
    # In the order of the replicas, as they come.
    ordered = sorted(bucket, key=lambda variable: replica_of(variable) or 0)
    sent = tf.concat([_as_bytes(v.read_value()) for v in own], axis=0) if own else tf.zeros([0], tf.uint8)
    group = running.process_sets.dp
    received = data_parallel.collective(hvd.allgather, sent, name=name, process_set=group, ignore_name_scope=True)
    parts = tf.split(received, [_nbytes(variable) for variable in ordered])
    assigned = []
    for variable, part in zip(ordered, parts, strict=True):
        if is_updated_elsewhere(variable):
            assigned.append(variable.assign(_from_bytes(part, variable), read_value=False))
    return [op for op in assigned if op is not None] if not tf.executing_eagerly() else []


def _as_bytes(value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(value, tf.uint8), [-1])


def _from_bytes(part: tf.Tensor, variable: Any) -> tf.Tensor:
    shape = variable.shape.as_list()
    size = variable.dtype.size
    return tf.bitcast(tf.reshape(part, [*shape, size] if size > 1 else shape), variable.dtype)


def _nbytes(variable: Any) -> int:
    count: int = variable.shape.num_elements()
    return count * int(variable.dtype.size)


def _placement(variable: Any) -> variables.Placement:
    store = variables.store_of(variable)
    state = store.state(variable) if store is not None else None
    assert state is not None
    return state.placement

"""Each replica keeps a share of its stage's optimizer slots, updates those weights, and the others take the values.

    stage's weights    replica 0                                    replica 1
    kernel             average ─ slots, update ── new value ──────▶ takes it
    embedding          takes it ◀─────────────── new value ──────── average ─ slots, update

Only the replica that updates a weight receives the average of its gradient (`sums_at_receivers`); on the others it is
None, as the gradient of another stage's weight is. An optimizer is handed the weights of this rank's share
(`keras_adapter`), and makes slots for no others. What it has written is then gathered, in buckets, as bits: replicas
stay equal to the last one.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20, sections 5.1
and 5.2 (of whole variables: slots are shared, and what comes of gradients; sums over microbatches are not).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf import data_parallel, optimizer_state, runtime, tf_internals, variables
from smp_tf.control import allgather_json
from smp_tf.data_parallel import IN_PARTS
from smp_tf.errors import StepError
from smp_tf.gradient_marks import comes_from_a_step, is_averaged
from smp_tf.lifecycle import on_shutdown
from smp_tf.partition.op_graph import Tensor
from smp_tf.partition.slot_shares import share_out
from smp_tf.partition.split import Split
from smp_tf.pipeline.reduction import MOST_BYTES
from smp_tf.topology import CommGroup

#: Bits travel as the widest of these that fits, by bytes of an element: Horovod counts elements.
_WIRE_TYPES = {8: tf.int64, 4: tf.int32, 2: tf.uint16, 1: tf.uint8}


#: Among how many replicas the slots of optimizers are shared, from when they were first built.
_shares_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _State:
    """What is counted while variables are shared out."""

    #: Variables that were shared out since `smp.init`: ranks that are replicas now may have been other stages before.
    count: int = 0
    #: Bytes whose slots each replica was to keep so far: counted, since models end when Python finds the time for it.
    loads: list[int] = []  # noqa: RUF012


def are_shared() -> bool:
    """Whether the replicas share the optimizer's slots among them."""
    running = runtime.current_or_none()
    return running is not None and running.config.shard_optimizer_state and running.topology.dp_size > 1


def are_received_apart() -> bool:
    """Whether replicas receive the averages of other gradients than each other: those of weights that they update."""
    # On the host they are summed in equal parts, which shares are not.
    return are_shared() and not runtime.current().config.gradient_offload


def count() -> int:
    """Among how many replicas slots are shared; 1 where all keep them."""
    return runtime.current().topology.dp_size if are_shared() else 1


def shares_of(optimizer: Any) -> int:
    """Among how many replicas the slots of an optimizer are shared: as many as when this was first asked."""
    return _shares_of.setdefault(optimizer, count())


def share(placed: Iterable[Any]) -> None:
    """Decide which replica keeps the slots of variables that this rank stores, and that a step has gradients of.

    What was decided for as many replicas stays, also after `smp.shutdown`: optimizers have slots by it.

    Args:
        placed: variables of models, the same in the same order on every replica.
    """
    if not are_shared():
        return
    replicas = count()
    # Several models may use one. One whose shape is open has no size by which to share it out: all replicas update it.
    known = {id(v.handle): v for v in placed if v.shape.is_fully_defined()}
    todo = [variable for variable in known.values() if _placement(variable).replicas != replicas]
    if not _State.loads:
        _State.loads, _State.count = [0] * replicas, 0
        on_shutdown(_State.loads.clear)
    for variable, replica in zip(todo, share_out([_nbytes(v) for v in todo], _State.loads), strict=True):
        placement = _placement(variable)
        placement.replica, placement.replicas = replica, replicas
        placement.number = runtime.starts(), _State.count
        _State.count += 1
        _State.loads[replica] += _nbytes(variable)


def is_updated_elsewhere(variable: Any) -> bool:
    """Whether another replica keeps the optimizer's slots of a variable, and updates it."""
    replica = replica_of(variable)
    return replica is not None and replica != runtime.current().topology.dp_rank


def replica_of(variable: Any) -> int | None:
    """The replica that keeps the slots of a variable which this rank stores; None where all replicas do."""
    if not are_shared() or variables.store_of(variable) is None:
        return None
    placement = _placement(variable)
    return placement.replica if placement.replicas == count() else None


def owners_of_shape(tensor: tf.Tensor) -> set[int]:
    """The replicas that alone update a weight of the shape and type of a tensor, among those of this rank's stage."""
    if not are_shared() or not tensor.shape.is_fully_defined():
        return set()
    alike = [v for v in variables.of_models() if v.dtype == tensor.dtype and v.shape == tensor.shape]
    return {replica for v in alike if (replica := replica_of(v)) is not None}


def receivers(split: Split, stage: int, handled: Sequence[Any]) -> dict[int, int]:
    """Which replica alone gets the average of a gradient: the one that updates its weight.

    Args:
        split: a cut step.
        stage: of this rank.
        handled: TensorFlow's variables, by index in the step's graph.

    Returns:
        The replica, by position among the step's outputs; gradients that all replicas get are left out: with
        gradient_offload all of them, and always what the step has made of a gradient, or of several weights.
    """
    if not are_received_apart():
        return {}
    graph = split.graph
    variable_of: dict[Tensor, Any] = {}
    of_several: set[Tensor] = set()
    for gradient in graph.gradients:
        for tensor in gradient.tensors:
            # That of a sum of weights is one tensor for all of them.
            if variable_of.setdefault(tensor, handled[gradient.variable]) is not handled[gradient.variable]:
                of_several.add(tensor)
    found: dict[int, int] = {}
    for position, output in enumerate(split.outputs):
        is_of_one = output.tensor in variable_of and output.tensor not in of_several
        if not output.gets_sum(stage, split.placement) or not is_of_one:
            continue
        if split.stage_of(output) != stage or tf.as_dtype(graph.type_of(output.tensor).dtype) not in IN_PARTS:
            continue
        replica = replica_of(variable_of[output.tensor])
        if replica is not None:
            found[position] = replica
    return found


def note_receivers(split: Split, handled: Sequence[Any], found: Mapping[int, int]) -> None:
    """Note which weights have gradients that a step gives to more than one replica, so that one may be anywhere.

    Args:
        split: a cut step.
        handled: TensorFlow's variables, by index in the step's graph.
        found: its receivers, as agreed.
    """
    variable_of = {
        tensor: handled[gradient.variable] for gradient in split.graph.gradients for tensor in gradient.tensors
    }
    # Of what a step has made of gradients it is not known of which.
    makes_others = any(o.is_gradient and o.tensor not in variable_of for o in split.outputs)
    alone = {id(variable_of[split.outputs[position].tensor].handle) for position in found}
    for variable in variable_of.values():
        if replica_of(variable) is not None and (makes_others or id(variable.handle) not in alone):
            _placement(variable).goes_to_all = True


def require_received(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Raise where a rank has a gradient that a step gives to another replica alone: no step has made it.

    It is another one on each replica, and the one that updates the weight would go by its own.

    Args:
        pairs: gradients, or None, and variables, as an optimizer is given them.

    Raises:
        StepError: there is one; zeros stand for None.
        tf.errors.OpError: likewise, in a function.
    """
    if not are_received_apart():
        return
    for gradient, variable in pairs:
        if gradient is None or is_averaged(gradient) or not is_updated_elsewhere(variable):
            continue
        if _placement(variable).goes_to_all or comes_from_a_step(gradient):
            continue
        words = (
            f"With shard_optimizer_state replica {replica_of(variable)} alone gets the gradient of {variable.name!r} "
            f"from a step, and updates the weight. Replica {runtime.current().topology.dp_rank} applies one that no "
            f"step has given it, so it is not averaged over the replicas. Compute gradients of a model's weights in a "
            f"step, or average them by smp.average_gradients(gradients) on all replicas before they are applied."
        )
        value = gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
        is_nothing = tf.logical_not(tf.reduce_any(tf.not_equal(value, 0)))
        if not tf.executing_eagerly():
            tf.debugging.Assert(is_nothing, [f"smp_tf: {words}"])
        elif not is_nothing:
            raise StepError(words)


def agreed_receivers(own: Mapping[int, int], step: str) -> dict[int, int]:
    """The receivers that all replicas of this rank's stage have found; all of them call it together.

    Which gradients are one tensor may depend on the batch: those of two rows that are added to a batch of one row are,
    where to one of several rows they are not.

    Args:
        own: of `receivers`.
        step: name of the step, for messages.

    Returns:
        By position, the receivers that all have.
    """
    name = f"who receives the gradients of step {step!r}"
    said = allgather_json(sorted(own.items()), CommGroup.DP_GROUP, name=name)
    found = [{position: replica for position, replica in other} for other in said]
    return {position: replica for position, replica in own.items() if all(o.get(position) == replica for o in found)}


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

    Raises:
        StepError: XLA is to compile this.
    """
    shared = list({id(v.handle): v for v in changed if replica_of(v) is not None}.values())
    if not shared:
        return
    if tf_internals.is_compiled_by_xla():
        raise StepError(
            "Gradients are applied inside a tf.function with jit_compile=True, and replicas share the optimizer's "
            "slots (shard_optimizer_state): XLA cannot compile what passes between them. Leave jit_compile out of the "
            "function that applies gradients; xla=True in the configuration compiles the step."
        )
    # By what is gathered, not by how many gathers there are: a replica may trace a function once more than another.
    code = zlib.crc32(" ".join(str(_placement(variable).number) for variable in shared).encode())
    # From the last to the first, about the order in which gradients are averaged.
    buckets = _buckets(shared[::-1])
    for number, bucket in enumerate(buckets):
        # Two at a time: each takes memory.
        behind = buckets[number - 2] if number >= 2 else []
        handles = [] if tf.executing_eagerly() else [variable.handle for variable in (*bucket, *behind)]
        _gather_bucket(bucket, f"smp_weights_{code:08x}_{number}", handles)


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


def _gather_bucket(bucket: Sequence[Any], name: str, handles: Sequence[Any]) -> None:
    """Exchange the values of variables."""
    import horovod.tensorflow as hvd

    running = runtime.current()
    wire = _WIRE_TYPES[min(8, *(int(variable.dtype.size) for variable in bucket))]
    own = [variable for variable in bucket if replica_of(variable) == running.topology.dp_rank]
    # In the order of the replicas, as they come.
    ordered = sorted(bucket, key=lambda variable: replica_of(variable) or 0)
    sent = tf.concat([_as_wire(v.read_value(), wire) for v in own], axis=0) if own else tf.zeros([0], wire)
    received = data_parallel.collective(
        hvd.allgather,
        sent,
        handles=handles,
        name=name,
        process_set=running.process_sets.dp,
        ignore_name_scope=True,
    )
    for variable, part in zip(ordered, tf.split(received, [_nbytes(v) // wire.size for v in ordered]), strict=True):
        if is_updated_elsewhere(variable):
            variable.assign(_from_wire(part, variable), read_value=False)


def _as_wire(value: tf.Tensor, wire: tf.DType) -> tf.Tensor:
    return tf.reshape(tf.bitcast(value, wire), [-1])


def _from_wire(part: tf.Tensor, variable: Any) -> tf.Tensor:
    shape, parts = variable.shape.as_list(), variable.dtype.size // part.dtype.size
    return tf.bitcast(tf.reshape(part, [*shape, parts] if parts > 1 else shape), variable.dtype)


def _nbytes(variable: Any) -> int:
    count: int = variable.shape.num_elements()
    return count * int(variable.dtype.size)


def _placement(variable: Any) -> variables.Placement:
    store = variables.store_of(variable)
    state = store.state(variable) if store is not None else None
    assert state is not None
    return state.placement

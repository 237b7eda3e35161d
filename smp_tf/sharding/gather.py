"""What replicas have made of their shares of a stage's weights, given to all others: they stay equal to the last bit.

replica 0   kernel, rows 0 to 40 of embedding  ──▶ ┐ allgather of bits, in buckets of limited bytes, in which
replica 1   bias, rows 41 to 99 of embedding   ──▶ ┘ every replica has about as much as the others
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.collectives.interface import collectives
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.partition.spread import SplitOver
from smp_tf.pipeline.programs.kinds import APPLY
from smp_tf.pipeline.run.reduction import MOST_BYTES
from smp_tf.pipeline.task import Task
from smp_tf.sharding import row_blocks
from smp_tf.sharding.layouts import slots_of
from smp_tf.variables.store import storage_of

#: Bits travel as the widest of these that fits, by bytes of an element: Horovod counts elements.
_WIRE_TYPES = {8: tf.int64, 4: tf.int32, 2: tf.uint16, 1: tf.uint8}


def gather(optimizer: Any, changed: Iterable[Any]) -> None:
    """Gives every replica what the others have made of their shares; every replica of this rank's stage calls it.

    Args:
        optimizer: of Keras, which has changed them.
        changed: variables, the same in the same order on every replica; those that all replicas update are left as they
            are.

    Raises:
        StepError: XLA is to compile this.
    """
    pieces = [piece for v in {id(v.handle): v for v in changed}.values() for piece in _pieces_of(v, optimizer)]
    if not pieces:
        return
    if tf_internals.is_compiled_by_xla():
        raise StepError(
            "Gradients are applied inside a tf.function with jit_compile=True, and replicas share the optimizer's "
            "slots (shard_optimizer_state): XLA cannot compile what passes between them. Leave jit_compile out of the "
            "function that applies gradients; xla=True in the configuration compiles the step."
        )
    # By what is gathered, not by how many gathers there are: a replica may trace a function once more than another.
    code = zlib.crc32(" ".join(f"{storage_of(piece.variable).number} {piece.rows}" for piece in pieces).encode())
    # From the last to the first, about the order in which gradients are averaged.
    buckets = _buckets(pieces[::-1])
    for number, bucket in enumerate(buckets):
        # Two at a time: each takes memory.
        behind = buckets[number - 2] if number >= 2 else []
        handles = [] if tf.executing_eagerly() else [h for piece in (*bucket, *behind) for h in piece.handles]
        _gather_bucket(bucket, f"smp_weights_{code:08x}_{number}", list({id(h): h for h in handles}.values()))


@dataclass(frozen=True)
class _Piece:
    """What one replica gives all others of a variable.

    Args:
        variable: of a distributed model.
        replica: the one that has updated it.
        rows: from which to which; None: all, of one that is not cut.
    """

    variable: Any
    replica: int
    rows: tuple[int, int] | None

    @property
    def shape(self) -> list[int]:
        """Of what is given."""
        shape: list[int] = self.variable.shape.as_list()
        return shape if self.rows is None else [self.rows[1] - self.rows[0], *shape[1:]]

    @property
    def nbytes(self) -> int:
        """Of what is given."""
        return math.prod(self.shape) * int(self.variable.dtype.size)

    @property
    def handles(self) -> list[Any]:
        """Of the variables that are read and written here."""
        block = storage_of(self.variable).block if self.rows is not None else None
        return [self.variable.handle, *([block.handle] if block is not None else [])]

    def value(self) -> tf.Tensor:
        """Returns what this rank, which has updated it, gives."""
        if self.rows is None:
            return self.variable.read_value()
        block = storage_of(self.variable).block
        assert block is not None, "it was updated"
        return block.read_value()

    def take(self, value: tf.Tensor) -> None:
        """Puts it in its place, as the replica has given it."""
        if self.rows is None:
            self.variable.assign(value, read_value=False)
        else:
            row_blocks.put(self.variable, self.rows, value)


def _pieces_of(variable: Any, optimizer: Any) -> Iterator[_Piece]:
    """Yields what of a variable single replicas update; nothing of one that all do."""
    slots = slots_of(variable, optimizer)
    if slots.only is not None:
        yield _Piece(variable, slots.only, None)
    elif isinstance(slots, SplitOver):
        for replica, rows in enumerate(itertools.pairwise(slots.borders)):
            if rows[0] < rows[1]:
                yield _Piece(variable, replica, rows)


def _buckets(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Returns the pieces in groups of limited bytes, in which every replica has about as much as the others."""
    replicas = runtime.current().topology.replicas
    queues = [[piece for piece in pieces if piece.replica == replica] for replica in range(replicas)]
    share_of_bucket = MOST_BYTES / replicas
    buckets: list[list[_Piece]] = []
    for queue in queues:
        filled, number = 0.0, 0
        for piece in queue:
            if number == len(buckets):
                buckets.append([])
            buckets[number].append(piece)
            filled += piece.nbytes
            if filled >= share_of_bucket:
                filled, number = 0.0, number + 1
    return buckets


def _gather_bucket(bucket: Sequence[_Piece], name: str, handles: Sequence[Any]) -> None:
    """Exchanges the values of pieces."""
    running = runtime.current()
    wire = _WIRE_TYPES[min(8, *(int(piece.variable.dtype.size) for piece in bucket))]
    own = [piece for piece in bucket if piece.replica == running.topology.replica]
    # In the order of the replicas, as they come.
    ordered = sorted(bucket, key=lambda piece: piece.replica)
    sent = tf.concat([_as_wire(piece.value(), wire) for piece in own], axis=0) if own else tf.zeros([0], wire)
    with tf.name_scope(str(Task(APPLY, running.topology.stage))):
        received = collectives().all_gather(sent, running.process_sets.dp, name, handles=handles)
    for piece, part in zip(ordered, tf.split(received, [p.nbytes // wire.size for p in ordered]), strict=True):
        if piece.replica != running.topology.replica:
            piece.take(_from_wire(part, piece))
        elif piece.rows is not None:
            piece.take(piece.value())
            row_blocks.empty([storage_of(piece.variable).block])


def _as_wire(value: tf.Tensor, wire: tf.DType) -> tf.Tensor:
    return tf.reshape(tf.bitcast(value, wire), [-1])


def _from_wire(part: tf.Tensor, piece: _Piece) -> tf.Tensor:
    dtype = piece.variable.dtype
    shape, parts = piece.shape, dtype.size // part.dtype.size
    return tf.bitcast(tf.reshape(part, [*shape, parts] if parts > 1 else shape), dtype)

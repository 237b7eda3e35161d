"""Sums gradients over replicas where a gradient, or each of its rows, goes to the replica that updates the weight.

    replica 0   kernel table[0:40] │ bias table[40:]       alltoall     kernel + kernel', table[0:40] + table'[0:40]
    replica 1   kernel' table'[0:40] │ bias' table'[40:]   ─────────▶   bias + bias', table[40:] + table'[40:]

This is a reduce-scatter, the first half of an all-reduce. With shared slots no other replica needs the sum, and all
replicas take the new weight afterwards. A gradient that is spread by rows may be the largest of all. It is sent in
rounds, so that little of what is sent and received is in memory besides it:

    round 0   first half of table[0:40] │ first half of table[40:]       ┐ the round after the next begins
    round 1   second half of table[0:40] │ second half of table[40:]     ┘ when this one is added up

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20, section 7.1
(what stage 1 and 2 send).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from smp_tf.partition.spread import SplitOver, Whole
from smp_tf.pipeline.run.reduction import MOST_BYTES
from smp_tf.replicas.two_byte_floats import decoded, encoded


@dataclass(frozen=True)
class Receiver:
    """Who gets the sum of a gradient: the same on all replicas, whatever they know of a tensor's shape in advance.

    Args:
        spread: how the sum lies over the replicas: whole on one of them, or split into rows.
        elements: of the whole gradient.
    """

    spread: Whole | SplitOver
    elements: int

    def gets(self, replica: int) -> bool:
        """Returns whether a replica gets the sum, or rows of it, which may be none."""
        return self.spread.only in (None, replica)

    def rounds(self, nbytes: int) -> int:
        """Returns in how many rounds rows are sent.

        Args:
            nbytes: of an element.
        """
        assert isinstance(self.spread, SplitOver), "what is whole is sent in the first round"
        most = max(stop - start for start, stop in itertools.pairwise(self.spread.borders))
        # No more than there are rows, or some would have none.
        return min(most, max(1, -(-self.elements * nbytes // MOST_BYTES)))

    def part(self, replica: int, number: int, rounds: int) -> tuple[int, int]:
        """Returns from which row to which a replica gets them in one of so many rounds."""
        assert isinstance(self.spread, SplitOver), "what is whole has no parts"
        start, stop = self.spread.rows_at({"D": replica})
        return start + (stop - start) * number // rounds, start + (stop - start) * (number + 1) // rounds


@dataclass(frozen=True)
class Route:
    """How gradients travel to the replicas that receive them.

    Args:
        replicas: number of replicas.
        replica: number of this replica.
        alltoall: takes a vector, how many of its elements go to each replica, in order, and the number of the round. It
            returns what all replicas have for this one, one after the other.
    """

    replicas: int
    replica: int
    alltoall: Callable[[tf.Tensor, tf.Tensor, int], tf.Tensor]


@dataclass(frozen=True)
class _Piece:
    """The piece of a tensor that one replica receives in a round.

    Args:
        whole: position of the tensor among those that are summed.
        receiver: who gets the sum.
        rows: the first row and the row after the last; None for all of the tensor.
    """

    whole: int
    receiver: int
    rows: tuple[int, int] | None

    def of(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the first row that a replica gets, and the row after its last."""
        tensor = tensors[self.whole]
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


def sums_at_receivers(
    tensors: Sequence[tf.Tensor], receivers: Sequence[Receiver], kind: str | None, route: Route
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the sums over the replicas of the tensors, or rows of tensors, that this replica receives.

    Args:
        tensors: tensors, equal in number, shapes and types on every replica.
        receivers: the receiver of each tensor.
        kind: the form in which they are sent. "bf16" and "fp16" are added up in float32. None sends them as they are;
            all must be of one type that Horovod sends.
        route: how the gradients travel.

    Returns:
        The sums of the tensors whose receiver is this replica, and this replica's rows of those that all receive, in
        order and of the same types; and the received tensors. When all of these are there, nothing is sent any more.
    """
    found: dict[int, list[tf.Tensor]] = {
        whole: [] for whole, receiver in enumerate(receivers) if receiver.gets(route.replica)
    }
    received: list[tf.Tensor] = []
    ends: list[list[tf.Tensor]] = []
    for number, pieces in enumerate(_rounds(tensors, receivers, route.replicas)):
        # Two rounds go on at a time, since each takes memory.
        with tf.control_dependencies(ends[number - 2] if number >= 2 else []):
            sums, came = _sums_of(tensors, pieces, number, kind, route)
        received.append(came)
        ends.append(list(sums.values()) or [came])
        for whole, part in sums.items():
            found[whole].append(part)
    return [_joined(parts, tensors[whole]) for whole, parts in found.items()], received


def _joined(parts: Sequence[tf.Tensor], whole: tf.Tensor) -> tf.Tensor:
    """Returns the rows of several rounds; none where this replica gets none."""
    if len(parts) < 2:
        return parts[0] if parts else whole[0:0]
    return tf.concat(parts, axis=0)


def _rounds(tensors: Sequence[tf.Tensor], receivers: Sequence[Receiver], replicas: int) -> list[list[_Piece]]:
    """Returns the pieces of tensors by the round in which they are sent. Whole and small ones are in the first."""
    found: list[list[_Piece]] = [[]]
    for whole, receiver in enumerate(receivers):
        if receiver.spread.only is not None:
            found[0].append(_Piece(whole, receiver.spread.only, None))
            continue
        rounds = receiver.rounds(tensors[whole].dtype.size)
        found += [[] for _ in range(rounds - len(found))]
        for number, replica in itertools.product(range(rounds), range(replicas)):
            rows = receiver.part(replica, number, rounds)
            if rows[0] < rows[1]:
                found[number].append(_Piece(whole, replica, rows))
    return found


def _sums_of(
    tensors: Sequence[tf.Tensor], pieces: Sequence[_Piece], number: int, kind: str | None, route: Route
) -> tuple[dict[int, tf.Tensor], tf.Tensor]:
    """Returns the sums of a round's pieces for this replica, by their tensors' positions; and what was received."""
    summed_as = tf.float32 if kind is not None else tensors[0].dtype
    sent, own = [], []
    for replica in range(route.replicas):
        of_it = [(piece.whole, piece.of(tensors)) for piece in pieces if piece.receiver == replica]
        sent.append(tf.reshape(encoded(_row([t for _, t in of_it], summed_as), kind), [-1]) if of_it else None)
        if replica == route.replica:
            own = of_it
    splits = tf.stack([0 if part is None else tf.size(part) for part in sent])
    received = route.alltoall(tf.concat([part for part in sent if part is not None], axis=0), splits, number)
    if not own:
        return {}, received
    # They are added in the order of the replicas, so that the bits do not depend on who adds.
    total = tf.reduce_sum(decoded(tf.reshape(received, [route.replicas, -1]), kind), axis=0)
    parts = tf.split(total, tf.stack([tf.size(t) for _, t in own]), num=len(own))
    return {whole: _as_one(part, like) for part, (whole, like) in zip(parts, own, strict=True)}, received


def _as_one(part: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Returns elements of a row in the shape and type of another tensor."""
    return tf.cast(tf.ensure_shape(tf.reshape(part, tf.shape(like)), like.shape), like.dtype)


def _row(tensors: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Returns the tensors one after the other, as the only row of a matrix."""
    return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], axis=0)[tf.newaxis]

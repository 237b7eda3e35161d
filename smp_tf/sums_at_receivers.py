"""Sum gradients over replicas where each is received by one of them: the replica that updates its weight.

    replica 0   kernel bias │ embedding     alltoall     kernel + kernel', bias + bias'
    replica 1   kernel' bias' │ embedding'  ─────────▶   embedding + embedding'

That is the first half of an all-reduce, a reduce-scatter, cut between weights: with shared slots nobody else needs the
sum, and what all replicas take afterwards is the new weight.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20, section 7.1
(what stage 1 and 2 send).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from smp_tf.wire_compression import decoded, encoded


@dataclass(frozen=True)
class Delivery:
    """How gradients travel to the replicas that receive them.

    Args:
        replicas: their number.
        replica: this one.
        alltoall: given a vector, and how many of its elements go to each replica in their order, gives what all
            replicas have for this one, one after the other.
    """

    replicas: int
    replica: int
    alltoall: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def sums_at_receivers(
    tensors: Sequence[tf.Tensor], receivers: Sequence[int], kind: str | None, delivery: Delivery
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The sums over the replicas of the tensors that this one receives.

    Args:
        tensors: of the same number, shapes and types on every replica.
        receivers: of each, which replica gets the sum.
        kind: what they are sent as, "bf16" or "fp16": then they are added up in float32. None: as they are, all of one
            type that Horovod sends.
        delivery: sends.

    Returns:
        The sums of those whose receiver is this replica, in their order, of the same types; and what was received,
        which is there when nothing is sent any more.
    """
    summed_as = tf.float32 if kind is not None else tensors[0].dtype
    sent = []
    for replica in range(delivery.replicas):
        of_it = [t for t, receiver in zip(tensors, receivers, strict=True) if receiver == replica]
        sent.append(tf.reshape(encoded(_row(of_it, summed_as), kind), [-1]) if of_it else None)
    splits = tf.stack([0 if part is None else tf.size(part) for part in sent])
    received = delivery.alltoall(tf.concat([part for part in sent if part is not None], axis=0), splits)
    own = [t for t, receiver in zip(tensors, receivers, strict=True) if receiver == delivery.replica]
    if not own:
        return [], received
    # In the order of the replicas: the bits do not depend on who adds.
    total = tf.reduce_sum(decoded(tf.reshape(received, [delivery.replicas, -1]), kind), axis=0)
    parts = tf.split(total, tf.stack([tf.size(t) for t in own]), num=len(own))
    sums = [
        tf.cast(tf.ensure_shape(tf.reshape(part, tf.shape(t)), t.shape), t.dtype)
        for part, t in zip(parts, own, strict=True)
    ]
    return sums, received


def _row(tensors: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Tensors one after the other, as the only row of a matrix."""
    return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], axis=0)[tf.newaxis]

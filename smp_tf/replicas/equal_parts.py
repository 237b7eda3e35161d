"""Sums gradients over replicas in equal parts. Each replica adds up one part, and gives it to all.

    replica 0   a0 │ a1      alltoall     a0 + b0 = s0      allgather     s0 │ s1
    replica 1   b0 │ b1   ───────────▶    a1 + b1 = s1   ────────────▶    s0 │ s1

The parts are cut from all tensors in a row. So every replica adds up and moves the same number of bytes, whatever the
sizes of the tensors. It moves as many as in a ring. All take the same bits of each part, so they stay equal. What is
sent may be smaller than what is added up (`two_byte_floats.py`).

Source: Thangakrishnan et al., "Herring: Rethinking the Parameter Server at Scale for the Cloud", SC20, section 4
(balanced fusion buffers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from smp_tf.replicas.two_byte_floats import decoded, encoded

#: A prime below 2^16, for the code of sizes.
_CODES = 65521


@dataclass(frozen=True)
class Exchange:
    """How the parts travel among the replicas.

    Args:
        replicas: number of replicas.
        alltoall: takes a tensor with one row for every replica, and returns the rows that all replicas have for this
            one.
        allgather: takes the row of this replica, and returns the rows of all.
    """

    replicas: int
    alltoall: Callable[[tf.Tensor], tf.Tensor]
    allgather: Callable[[tf.Tensor], tf.Tensor]


def sums_in_parts(tensors: Sequence[tf.Tensor], kind: str | None, exchange: Exchange) -> list[tf.Tensor]:
    """Returns the sums over the replicas of tensors that all of them have.

    Args:
        tensors: tensors, equal in number, shapes and types on every replica.
        kind: the form in which they are sent. "bf16" and "fp16" are added up in float32. None sends them as they are;
            all must be of one type that Horovod sends.
        exchange: how the parts travel.

    Returns:
        The sums, of the same types, and equal to the last bit on all replicas. They are an error of TensorFlow where
        the tensors of another replica are known to have other sizes.
    """
    summed_as = tf.float32 if kind is not None else tensors[0].dtype
    flat = [tf.reshape(tf.cast(tensor, summed_as), [-1]) for tensor in tensors]
    sizes = tf.stack([tf.size(one) for one in flat])
    whole = tf.concat(flat, axis=0)
    missing = -tf.size(whole) % exchange.replicas
    parts = tf.reshape(tf.pad(whole, [[0, missing]]), [exchange.replicas, -1])
    # Otherwise, shifted parts would be added up silently.
    rows = encoded(parts, kind)
    code = tf.cast(code_of(sizes), rows.dtype)
    sent = tf.concat([rows, tf.fill([exchange.replicas, 1], code)], axis=1)
    received = exchange.alltoall(sent)
    with tf.control_dependencies(require_alike(tf.reduce_all(tf.equal(received[:, -1], code)), sizes)):
        part = tf.reduce_sum(decoded(received[:, :-1], kind), axis=0, keepdims=True)
    gathered = tf.reshape(decoded(exchange.allgather(encoded(part, kind)), kind), [-1])
    sums = tf.split(gathered[: tf.size(whole)], sizes, num=len(tensors))
    return [
        tf.cast(tf.ensure_shape(tf.reshape(one, tf.shape(tensor)), tensor.shape), tensor.dtype)
        for one, tensor in zip(sums, tensors, strict=True)
    ]


def code_of(sizes: tf.Tensor) -> tf.Tensor:
    """Returns a number below 2^16 that tensors of other sizes most likely do not have.

    Args:
        sizes: elements of each tensor, int32[n].

    Returns:
        An int64 scalar.
    """
    places = tf.range(1, tf.size(sizes) + 1, dtype=tf.int64)
    return tf.reduce_sum((tf.cast(sizes, tf.int64) % _CODES) * (places * 7919 % _CODES) % _CODES) % _CODES


def require_alike(alike: tf.Tensor, sizes: tf.Tensor) -> list[tf.Operation]:
    """Makes it an error when replicas have tensors of other sizes.

    Args:
        alike: whether the sizes are equal, a bool scalar.
        sizes: elements of each tensor of this replica, for the message.

    Returns:
        Ops that have to be waited for.
    """
    checked = tf.debugging.Assert(
        alike,
        [
            "smp_tf: gradients that replicas average must have the same shapes on all; on another replica they have "
            "others. This one has tensors of these numbers of elements:",
            sizes,
            "A gradient by an input has the size of the batch: leave it out, or give all replicas batches of one size.",
        ],
        summarize=20,
    )
    return [] if checked is None else [checked]

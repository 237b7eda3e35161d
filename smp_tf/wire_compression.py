"""Sum gradients over replicas in two bytes an element: each is sent in half of its size and added up in float32.

    replica 0   a0 │ a1      alltoall     a0 + b0 = s0      allgather     s0 │ s1
    replica 1   b0 │ b1   ───────────▶    a1 + b1 = s1   ────────────▶    s0 │ s1

Every replica adds up one part, all of one size, and all take the same bits from it: they stay equal. Each sends as much
as in a ring. bfloat16 has the range of float32; float16, with more digits and a small range, has an exponent per part,
which travels behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

#: Types of gradients that are sent in half of their size, or that Horovod would send as float32.
COMPRESSED = (tf.float32, tf.bfloat16)
#: Scaled, the largest value of a part is at most 2 to this power; float16 ends below 2^16.
_MOST = 15.0
#: No exponent is smaller: 2 to the opposite of it is a float32.
_LEAST = -100.0


@dataclass(frozen=True)
class Exchange:
    """How the parts travel among the replicas.

    Args:
        replicas: their number.
        alltoall: gives, of a tensor with one row for every replica, the rows that all replicas have for this one.
        allgather: gives the rows of all replicas, each of which has one.
    """

    replicas: int
    alltoall: Callable[[tf.Tensor], tf.Tensor]
    allgather: Callable[[tf.Tensor], tf.Tensor]


def compressed_sums(tensors: Sequence[tf.Tensor], kind: str, exchange: Exchange) -> list[tf.Tensor]:
    """The sums over the replicas of tensors that all of them have.

    Args:
        tensors: of a type in `COMPRESSED`, the same number, shapes and types on every replica.
        kind: what they are sent as, "bf16" or "fp16".
        exchange: sends.

    Returns:
        The sums, of the same types; equal to the last bit on all replicas.
    """
    flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
    sizes = tf.stack([tf.size(one) for one in flat])
    whole = tf.concat(flat, axis=0)
    missing = -tf.size(whole) % exchange.replicas
    parts = tf.reshape(tf.pad(whole, [[0, missing]]), [exchange.replicas, -1])
    received = _decoded(exchange.alltoall(_encoded(parts, kind)), kind)
    part = tf.reduce_sum(received, axis=0, keepdims=True)
    gathered = tf.reshape(_decoded(exchange.allgather(_encoded(part, kind)), kind), [-1])
    sums = tf.split(gathered[: tf.size(whole)], sizes, num=len(tensors))
    return [
        tf.cast(tf.ensure_shape(tf.reshape(one, tf.shape(tensor)), tensor.shape), tensor.dtype)
        for one, tensor in zip(sums, tensors, strict=True)
    ]


def _encoded(rows: tf.Tensor, kind: str) -> tf.Tensor:
    """Rows of float32 as rows of uint16, which Horovod sends whatever they mean."""
    if kind == "bf16":
        return tf.bitcast(tf.cast(rows, tf.bfloat16), tf.uint16)
    largest = tf.reduce_max(tf.abs(rows), axis=1, keepdims=True)
    # Of zeros, and of what is not finite, which stays so.
    usual = tf.where(tf.math.is_finite(largest) & (largest > 0.0), largest, 1.0)
    exponents = tf.maximum(tf.math.ceil(tf.math.log(usual) / tf.math.log(2.0)) - _MOST, _LEAST)
    halves = tf.cast(tf.concat([rows * tf.pow(2.0, -exponents), exponents], axis=1), tf.float16)
    return tf.bitcast(halves, tf.uint16)


def _decoded(rows: tf.Tensor, kind: str) -> tf.Tensor:
    """What `_encoded` has made rows of."""
    if kind == "bf16":
        return tf.cast(tf.bitcast(rows, tf.bfloat16), tf.float32)
    values = tf.cast(tf.bitcast(rows, tf.float16), tf.float32)
    return values[:, :-1] * tf.pow(2.0, values[:, -1:])

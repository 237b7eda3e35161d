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

#: Types of gradients that are sent so; Horovod sends bfloat16 as float32, and adds float16 up as it is.
COMPRESSED = (tf.float32, tf.bfloat16, tf.float16)
#: Scaled, the largest value of a part is at most 2 to this power; float16 ends below 2^16.
_MOST = 15.0
#: No exponent is smaller: 2 to the opposite of it is a float32.
_LEAST = -100.0
#: A prime below 2^16, for the code of sizes.
_CODES = 65521


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
        The sums, of the same types; equal to the last bit on all replicas. An error of TensorFlow where the tensors of
        another replica are known to have other sizes.
    """
    flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
    sizes = tf.stack([tf.size(one) for one in flat])
    whole = tf.concat(flat, axis=0)
    missing = -tf.size(whole) % exchange.replicas
    parts = tf.reshape(tf.pad(whole, [[0, missing]]), [exchange.replicas, -1])
    # Shifted against each other, parts would be added up without a word.
    code = _code_of(sizes)
    sent = tf.concat([_encoded(parts, kind), tf.fill([exchange.replicas, 1], code)], axis=1)
    received = exchange.alltoall(sent)
    with tf.control_dependencies(_require_alike(tf.reduce_all(tf.equal(received[:, -1], code)), sizes)):
        part = tf.reduce_sum(_decoded(received[:, :-1], kind), axis=0, keepdims=True)
    gathered = tf.reshape(_decoded(exchange.allgather(_encoded(part, kind)), kind), [-1])
    sums = tf.split(gathered[: tf.size(whole)], sizes, num=len(tensors))
    return [
        tf.cast(tf.ensure_shape(tf.reshape(one, tf.shape(tensor)), tensor.shape), tensor.dtype)
        for one, tensor in zip(sums, tensors, strict=True)
    ]


def _code_of(sizes: tf.Tensor) -> tf.Tensor:
    """A uint16 that tensors of other sizes hardly have."""
    places = tf.range(1, tf.size(sizes) + 1, dtype=tf.int64)
    code = tf.reduce_sum((tf.cast(sizes, tf.int64) % _CODES) * (places * 7919 % _CODES) % _CODES) % _CODES
    return tf.cast(code, tf.uint16)


def _require_alike(alike: tf.Tensor, sizes: tf.Tensor) -> list[tf.Operation]:
    """Makes it an error that replicas have tensors of other sizes; what has to be waited for."""
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


def _encoded(rows: tf.Tensor, kind: str) -> tf.Tensor:
    """Rows of float32 as rows of uint16, which Horovod sends whatever they mean."""
    if kind == "bf16":
        return tf.bitcast(tf.cast(rows, tf.bfloat16), tf.uint16)
    # What is not finite stays so, and leaves the scale of the others alone; zeros have any.
    finite = tf.where(tf.math.is_finite(rows), tf.abs(rows), 0.0)
    largest = tf.reduce_max(finite, axis=1, keepdims=True)
    usual = tf.where(largest > 0.0, largest, 1.0)
    exponents = tf.maximum(tf.math.ceil(tf.math.log(usual) / tf.math.log(2.0)) - _MOST, _LEAST)
    halves = tf.cast(tf.concat([rows * tf.pow(2.0, -exponents), exponents], axis=1), tf.float16)
    return tf.bitcast(halves, tf.uint16)


def _decoded(rows: tf.Tensor, kind: str) -> tf.Tensor:
    """What `_encoded` has made rows of."""
    if kind == "bf16":
        return tf.cast(tf.bitcast(rows, tf.bfloat16), tf.float32)
    values = tf.cast(tf.bitcast(rows, tf.float16), tf.float32)
    return values[:, :-1] * tf.pow(2.0, values[:, -1:])

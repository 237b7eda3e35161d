"""A number that tells whether all replicas have tensors of the same sizes, small enough to travel with them."""

from __future__ import annotations

import tensorflow as tf

#: A prime below 2^16: codes, and sums of 256 of them, are exact in float32.
_CODES = 65521


def code_of(sizes: tf.Tensor) -> tf.Tensor:
    """A number below 2^16 that other sizes hardly have.

    Args:
        sizes: of tensors, in elements, int32[n].

    Returns:
        The code, an int64 scalar.
    """
    places = tf.range(1, tf.size(sizes) + 1, dtype=tf.int64)
    return tf.reduce_sum((tf.cast(sizes, tf.int64) % _CODES) * (places * 7919 % _CODES) % _CODES) % _CODES


def require_alike(alike: tf.Tensor, sizes: tf.Tensor) -> list[tf.Operation]:
    """Makes it an error that replicas have tensors of other sizes.

    Args:
        alike: whether all have the same code.
        sizes: of the tensors here.

    Returns:
        What has to be waited for.

    Raises:
        tf.errors.InvalidArgumentError: called eagerly, or when the graph runs: they have not.
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

"""What gradients are sent as, in two bytes an element.

bfloat16 has the range of float32; float16, with more digits and a small range, has an exponent per row, which travels
after it.
"""

from __future__ import annotations

import tensorflow as tf

#: Types of gradients that are sent so; Horovod sends bfloat16 as float32, and adds float16 up as it is.
COMPRESSED = (tf.float32, tf.bfloat16, tf.float16)
#: Scaled, the largest value of a row is at most 2 to this power; float16 ends below 2^16.
_MOST = 15.0
#: No exponent is smaller: 2 to the opposite of it is a float32.
_LEAST = -100.0


def encoded(rows: tf.Tensor, kind: str | None) -> tf.Tensor:
    """Returns the rows as they are sent.

    Args:
        rows: of float32; of any type where `kind` is None.
        kind: "bf16" or "fp16"; None to leave them as they are.

    Returns:
        Rows of uint16, which Horovod sends whatever they mean.
    """
    if kind is None:
        return rows
    if kind == "bf16":
        return tf.bitcast(tf.cast(rows, tf.bfloat16), tf.uint16)
    # What is not finite stays so, and leaves the scale of the others alone; zeros have any.
    finite = tf.where(tf.math.is_finite(rows), tf.abs(rows), 0.0)
    largest = tf.reduce_max(finite, axis=1, keepdims=True)
    usual = tf.where(largest > 0.0, largest, 1.0)
    exponents = tf.maximum(tf.math.ceil(tf.math.log(usual) / tf.math.log(2.0)) - _MOST, _LEAST)
    halves = tf.cast(tf.concat([rows * tf.pow(2.0, -exponents), exponents], axis=1), tf.float16)
    return tf.bitcast(halves, tf.uint16)


def decoded(rows: tf.Tensor, kind: str | None) -> tf.Tensor:
    """Returns what `encoded` has made rows of.

    Args:
        rows: as they were sent.
        kind: as it was given to `encoded`.
    """
    if kind is None:
        return rows
    if kind == "bf16":
        return tf.cast(tf.bitcast(rows, tf.bfloat16), tf.float32)
    values = tf.cast(tf.bitcast(rows, tf.float16), tf.float32)
    return values[:, :-1] * tf.pow(2.0, values[:, -1:])

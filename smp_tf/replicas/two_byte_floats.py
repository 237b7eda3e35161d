"""Forms in which gradients are sent, with two bytes per element.

bfloat16 has the range of float32. float16 has more digits and a small range, so each row has an exponent, which travels
after it.
"""

from __future__ import annotations

import tensorflow as tf

#: Types of gradients that are sent in this way. Horovod sends bfloat16 as float32, and adds float16 up as it is.
COMPRESSED = (tf.float32, tf.bfloat16, tf.float16)
#: The largest value of a scaled row is at most 2 to this power, since float16 ends below 2^16.
_MOST = 15.0
#: The smallest exponent. 2 to its opposite is still a float32.
_LEAST = -100.0


def encoded(rows: tf.Tensor, kind: str | None) -> tf.Tensor:
    """Returns the rows in the form in which they are sent.

    Args:
        rows: rows of float32, or of any type where `kind` is None.
        kind: "bf16" or "fp16"; None to leave them as they are.

    Returns:
        Rows of uint16, which Horovod sends whatever they stand for.
    """
    if kind is None:
        return rows
    if kind == "bf16":
        return tf.bitcast(tf.cast(rows, tf.bfloat16), tf.uint16)
    # Values that are not finite stay so, and do not change the scale of the others. Zeros have any scale.
    finite = tf.where(tf.math.is_finite(rows), tf.abs(rows), 0.0)
    largest = tf.reduce_max(finite, axis=1, keepdims=True)
    usual = tf.where(largest > 0.0, largest, 1.0)
    exponents = tf.maximum(tf.math.ceil(tf.math.log(usual) / tf.math.log(2.0)) - _MOST, _LEAST)
    halves = tf.cast(tf.concat([rows * tf.pow(2.0, -exponents), exponents], axis=1), tf.float16)
    return tf.bitcast(halves, tf.uint16)


def decoded(rows: tf.Tensor, kind: str | None) -> tf.Tensor:
    """Returns the rows that `encoded` has encoded.

    Args:
        rows: rows in the form in which they were sent.
        kind: the kind that was given to `encoded`.
    """
    if kind is None:
        return rows
    if kind == "bf16":
        return tf.cast(tf.bitcast(rows, tf.bfloat16), tf.float32)
    values = tf.cast(tf.bitcast(rows, tf.float16), tf.float32)
    return values[:, :-1] * tf.pow(2.0, values[:, -1:])

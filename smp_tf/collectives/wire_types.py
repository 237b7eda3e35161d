"""The types in which tensors travel between replicas, by one rule for all senders.

moved      a broadcast, a gather    Horovod's own types as they are, of others the bytes, as whole numbers
added up   a sum                    in a type that Horovod adds up and that holds the sum, or wraps around alike

complex64, complex128    moved as their bytes, added up as pairs of float32, float64
uint32, uint64           moved and added up as int32, int64, which have the same bits
bfloat16                 moved as its bytes, added up as float32
float8                   moved as float16, which has all its values, added up as float32
int16, uint16            moved as they are, added up as int32
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smp_tf.errors import StepError

#: The types that Horovod broadcasts and gathers, and those that it adds up.
_MOVED = frozenset(
    {
        tf.bool, tf.float16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16,
    }
)  # fmt: skip
_SUMMED = frozenset({tf.float16, tf.float32, tf.float64, tf.int8, tf.int32, tf.int64, tf.uint8})
#: Integer types by their bytes; for 16 bytes, two of 8.
_WHOLE = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64, 16: tf.int64}
#: Types that are added up as other types with the same bits, since the sums have the same bits, too.
_SAME_SUMS = {tf.complex64: tf.float32, tf.complex128: tf.float64, tf.uint32: tf.int32, tf.uint64: tf.int64}


def moved_as(dtype: tf.DType, what: str) -> tf.DType:
    """Returns the type in which tensors of a type are broadcast and gathered.

    Args:
        dtype: The type.
        what: Words for what is sent, for the message.

    Raises:
        StepError: Values of this type have no bytes that could be sent.
    """
    if dtype in _MOVED:
        return dtype
    if _is_float8(dtype):
        return tf.float16
    has_bytes = dtype.is_floating or dtype.is_complex or dtype.is_integer
    # TensorFlow does not reinterpret the bits of integers of four bits and fewer.
    if has_bytes and not dtype.is_quantized and not dtype.name.endswith(("int2", "int4")):
        return _WHOLE[dtype.size]
    raise StepError(
        f"Replicas send each other numbers and truth values. Received: {what}, of type {dtype.name}. Keep it out of "
        f"the model's variables, or train with one replica."
    )


def moved(tensor: tf.Tensor, what: str) -> tf.Tensor:
    """Returns a tensor in the form in which it is broadcast or gathered. `from_moved` restores it to the last bit.

    Args:
        tensor: A tensor of any type that has bytes.
        what: Words for what is sent, for the message.

    Raises:
        StepError: The tensor is of another type.
    """
    wire = moved_as(tensor.dtype, what)
    if wire == tensor.dtype:
        return tensor
    return tf.cast(tensor, wire) if _is_float8(tensor.dtype) else tf.bitcast(tensor, wire)


def from_moved(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the tensor that `moved` was given, from the form that was received.

    Args:
        tensor: The tensor in the form that was received.
        dtype: The type of the tensor on the sender.
    """
    if tensor.dtype == dtype:
        return tensor
    return tf.cast(tensor, dtype) if _is_float8(dtype) else tf.bitcast(tensor, dtype)


def _is_float8(dtype: tf.DType) -> bool:
    """Returns whether a type is a float8, whose bits TensorFlow does not reinterpret."""
    return bool(dtype.is_floating) and dtype.size == 1


def summed_as(dtype: tf.DType, what: str) -> tf.DType:
    """Returns the type in which tensors of a type are added up over replicas.

    Args:
        dtype: The type.
        what: Words for what is sent, for the message.

    Raises:
        StepError: Values of this type have no sum, or none that Horovod can compute.
    """
    if dtype in _SUMMED:
        return dtype
    if dtype in _SAME_SUMS:
        return _SAME_SUMS[dtype]
    if dtype.is_floating:
        return tf.float32
    if dtype in (tf.int16, tf.uint16):
        return tf.int32
    raise StepError(
        f"Replicas add up numbers. Received: {what}, of type {dtype.name}. Cast it to a type of numbers that "
        f"TensorFlow adds up, such as float32 or int64."
    )


def summed(tensor: tf.Tensor, what: str) -> tf.Tensor:
    """Returns a tensor in the form in which it is added up. `from_summed` restores the sum.

    Args:
        tensor: A tensor of a type of numbers.
        what: Words for what is sent, for the message.

    Raises:
        StepError: The tensor is of another type.
    """
    wire = summed_as(tensor.dtype, what)
    return tf.bitcast(tensor, wire) if tensor.dtype in _SAME_SUMS else tf.cast(tensor, wire)


def from_summed(total: tf.Tensor, dtype: tf.DType) -> Any:
    """Returns the sum of tensors that were sent in the form of `summed`.

    Args:
        total: The sum in the form that was received.
        dtype: The type of the tensors.
    """
    return tf.bitcast(total, dtype) if dtype in _SAME_SUMS else tf.cast(total, dtype)

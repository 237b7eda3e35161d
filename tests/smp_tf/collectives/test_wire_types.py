"""What is sent between replicas is of a type that Horovod sends, and comes back as it was."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow.mpi_ops  # noqa: F401  registers its ops
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from smp_tf.collectives import wire_types
from smp_tf.errors import StepError

_8 = tf.dtypes.experimental
NUMBERS = [
    tf.bfloat16, tf.complex64, tf.complex128, tf.float16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32,
    tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64,
]  # fmt: skip


def taken_by(*ops: str) -> set[tf.DType]:
    """The types that all of some ops of Horovod take."""

    def types(op: str) -> set[tf.DType]:
        [attribute] = [a for a in op_def_registry.get(op).attr if a.name == "T"]
        return {tf.as_dtype(number) for number in attribute.allowed_values.list.type}

    return set.intersection(*(types(op) for op in ops))


def values_of(dtype: tf.DType) -> tf.Tensor:
    """Two numbers whose bits are not all alike."""
    return tf.cast(tf.constant([[1.5, 3.0]]), dtype)


@pytest.mark.parametrize("dtype", [*NUMBERS, tf.bool, _8.float8_e5m2, _8.float8_e4m3fn], ids=lambda d: d.name)
def test_what_is_moved_comes_back_to_the_bit(dtype: tf.DType) -> None:
    given = values_of(dtype)
    sent = wire_types.moved(given, "x")
    assert sent.dtype in taken_by("HorovodAllgather", "HorovodBroadcast", "HorovodAlltoall")
    assert sent.dtype == wire_types.moved_as(dtype, "x")
    back = wire_types.from_moved(sent, dtype)
    assert (back.dtype, back.shape) == (dtype, [1, 2])
    assert back.numpy().tobytes() == given.numpy().tobytes()


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda d: d.name)
def test_sums_are_those_of_the_type(dtype: tf.DType) -> None:
    given = values_of(dtype)
    sent = wire_types.summed(given, "x")
    assert sent.dtype in taken_by("HorovodAllreduce", "HorovodGroupedAllreduce")
    total = wire_types.from_summed(sent + sent, dtype)
    assert (total.dtype, total.numpy().tolist()) == (dtype, (given + given).numpy().tolist())


@pytest.mark.parametrize("dtype", [tf.string, tf.variant, tf.resource, tf.qint8, _8.int4], ids=lambda d: d.name)
def test_other_types_are_refused_in_words(dtype: Any) -> None:
    with pytest.raises(
        StepError, match=rf"send each other numbers and truth values\. Received: x, of type {dtype.name}"
    ):
        wire_types.moved_as(dtype, "x")
    with pytest.raises(StepError, match=rf"add up numbers\. Received: x, of type {dtype.name}"):
        wire_types.summed_as(dtype, "x")

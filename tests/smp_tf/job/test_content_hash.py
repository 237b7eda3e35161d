"""Hashes of tensors tell values apart, whatever their type."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.job.content_hash import content_hash

KINDS = [
    tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.complex64, tf.complex128, tf.bool,
    tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64,
]  # fmt: skip


def hash_of(tensor: tf.Tensor) -> int:
    found = tf.function(content_hash)(tensor)
    assert (found.dtype, found.shape) == (tf.int64, (1,))
    return int(found[0])


class TestHash:
    @pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.name)
    def test_equal_tensors_have_equal_hashes_and_others_do_not(self, dtype: tf.DType) -> None:
        one, same, other = (tf.cast(values, dtype) for values in ([0, 1, 1], [0, 1, 1], [0, 1, 0]))
        assert hash_of(one) == hash_of(same)
        assert hash_of(one) != hash_of(other)

    def test_one_bit_is_enough(self) -> None:
        batch = np.zeros([64, 28, 28], np.float32)
        before = hash_of(tf.constant(batch))
        batch[63, 27, 27] = np.nextafter(np.float32(0), np.float32(1))
        assert hash_of(tf.constant(batch)) != before

    def test_order_counts(self) -> None:
        assert hash_of(tf.constant([1.0, 2.0])) != hash_of(tf.constant([2.0, 1.0]))

    @pytest.mark.parametrize("shape", [[], [0], [0, 3]])
    def test_scalars_and_empty_tensors(self, shape: list[int]) -> None:
        assert hash_of(tf.zeros(shape)) == hash_of(tf.zeros(shape))

    def test_text(self) -> None:
        assert hash_of(tf.constant(["a", "bc"])) == hash_of(tf.constant(["a", "bc"]))
        assert hash_of(tf.constant(["a", "bc"])) != hash_of(tf.constant(["ab", "c"]))

"""What TensorFlow's allocator counts, where it counts."""

from __future__ import annotations

import pytest
import tensorflow as tf

from smp_tf.pipeline import allocator

MIB = 2**20


def test_a_large_tensor_is_counted_as_long_as_it_is_there() -> None:
    if not allocator.counts():
        # Without oneDNN a processor's allocator counts nothing.
        assert (allocator.in_use(), allocator.peak()) == (0, 0)
        return
    before = allocator.in_use()
    held = tf.zeros([4 * MIB])
    assert allocator.in_use() - before >= 16 * MIB
    del held
    assert allocator.in_use() == before
    assert allocator.peak() - before >= 16 * MIB
    allocator.forget_peak()
    assert allocator.peak() == before


def test_an_allocator_that_does_not_count_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> None:
        raise ValueError("Allocator stats not available")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", refuse)
    assert (allocator.in_use(), allocator.peak(), allocator.counts()) == (0, 0, False)

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


@pytest.mark.parametrize(("value", "counted_from"), [("1", 0), ("True", 0), ("0", 256 << 10), (None, 256 << 10)])
def test_another_allocator_counts_small_tensors_too(
    value: str | None, counted_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CPU_ALLOCATOR_USE_BFC", raising=False)
    if value is not None:
        monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", value)
    assert allocator.counted_from() == counted_from


def test_an_allocator_that_does_not_count_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> None:
        raise ValueError("Allocator stats not available")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", refuse)
    assert (allocator.in_use(), allocator.peak(), allocator.counts()) == (0, 0, False)

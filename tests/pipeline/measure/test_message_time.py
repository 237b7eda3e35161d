"""Two sizes of messages tell what each takes, and each byte."""

from __future__ import annotations

import pytest

from smp_tf.pipeline.measure.message_time import line_through


def test_a_line_through_both_sizes() -> None:
    assert line_through(20e-6 + 4096 * 1e-10, 20e-6 + 2**20 * 1e-10) == pytest.approx((20e-6, 1e-10))


def test_times_that_fall_with_the_size_are_those_of_messages() -> None:
    """What is measured varies. A byte never counts less than nothing, nor does a message."""
    message, byte = line_through(30e-6, 20e-6)
    assert 0 < byte < 1e-12
    assert message == pytest.approx(30e-6, rel=1e-4)
    assert line_through(0.0, 1e-4) == (0.0, pytest.approx(1e-4 / (2**20 - 4096)))

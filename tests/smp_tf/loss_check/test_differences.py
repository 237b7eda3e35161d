"""What a loss looks like that is not that of the whole batch, and what is rounding."""

from __future__ import annotations

import numpy as np
import pytest

from smp_tf.loss_check.differences import Parts, cause_of, is_equal


@pytest.mark.parametrize(
    ("whole", "split", "same"),
    [
        (1.0, 1.0 + 1e-6, True),
        (1.0, 1.001, False),
        (np.nan, np.nan, True),
        (1.0, np.nan, False),
        (np.inf, np.inf, True),
        ([1.0, 0.0], [1.0, 1e-6], True),
        ([1.0, 0.0], [1.0, 1e-2], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_only_rounding_is_no_difference(whole: object, split: object, same: bool) -> None:
    assert is_equal(np.asarray(whole, np.float32), np.asarray(split)) is same


def test_what_rounding_is_depends_on_the_type_and_on_what_was_summed() -> None:
    assert not is_equal(np.float64(1.0), np.asarray(1.0 + 1e-6))
    assert is_equal(np.float16(1.0), np.asarray(1.001))
    assert not is_equal(np.float32(1e-6), np.asarray(0.0))
    assert is_equal(np.float32(1e-6), np.asarray(0.0), scale=1.0)
    assert not is_equal(np.int32(7), np.asarray(8), scale=100.0)


def test_parts_are_averaged_by_their_samples() -> None:
    parts = Parts([1.0, 4.0], [2, 1])
    assert (parts.average, parts.sum) == (2.0, 5.0)


@pytest.mark.parametrize(
    ("whole", "parts", "divides", "words"),
    [
        (6.0, [1.0, 2.0, 3.0], False, "It is the sum over the microbatches"),
        (6.0, [1.0, 2.0, 3.0], True, "It is the sum over the microbatches"),
        (2.0, [np.nan, 2.0], True, "In microbatch 0 it is nan: that microbatch has none"),
        (2.2, [1.0, 3.0], True, "It is divided by something that differs from microbatch to microbatch"),
        (2.2, [1.0, 3.0], False, "It is no average over samples"),
    ],
)
def test_the_likely_cause_is_named(whole: float, parts: list[float], divides: bool, words: str) -> None:
    assert words in cause_of(whole, Parts(parts, [4] * len(parts)), divides=divides)

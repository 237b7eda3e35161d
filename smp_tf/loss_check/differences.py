"""Tells whether a loss or a log of microbatches equals that of the whole batch and, if not, what it may be instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: By bytes per element, how much two ways of summing the same numbers may differ, relative to the numbers.
_ROUNDING = {8: 1e-9, 4: 3e-5, 2: 2e-2}


@dataclass(frozen=True)
class Parts:
    """The values of a number for the microbatches of a batch.

    Args:
        values: value for each microbatch of each replica.
        samples: number of samples of each of these.
    """

    values: Sequence[float]
    samples: Sequence[int]

    @property
    def average(self) -> float:
        """Returns the average by samples, as smp_tf computes it."""
        return float(np.dot(self.values, self.samples) / sum(self.samples))

    @property
    def sum(self) -> float:
        """Returns the sum over the microbatches."""
        return float(sum(self.values))


def is_equal(
    whole: np.ndarray, split: np.ndarray, scale: float = 0.0, *, itemsize: int | None = None, rounded: float = 0.0
) -> bool:
    """Returns whether two values are equal except for rounding.

    Args:
        whole: the value that was computed once.
        split: the value that was made from parts.
        scale: size of the numbers that they are sums of.
        itemsize: bytes of an element of these numbers, where they have another type.
        rounded: by how much more they may differ.
    """
    a, b = np.asarray(whole, np.float64), np.asarray(split, np.float64)
    if a.shape != b.shape:
        return False
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return False
    if not finite.any():
        return True
    a, b = a[finite], b[finite]
    is_exact = np.asarray(whole).dtype.kind in "iub"
    allowed = 0.0 if is_exact else _ROUNDING.get(min(itemsize or 8, whole.dtype.itemsize), 0.0)
    largest = max(float(np.abs(a).max()), float(np.abs(b).max()), scale)
    return bool(np.abs(a - b).max() <= allowed * largest + rounded)


def cause_of(whole: float, parts: Parts, *, divides: bool, itemsize: int = 4) -> str:
    """Says what a number seems to be that differs between the whole batch and the average of its microbatches.

    Args:
        whole: the number for the whole batch.
        parts: the number for each microbatch.
        divides: whether the number was divided by something that depends on samples.
        itemsize: bytes of an element of its type.
    """
    bad = [number for number, value in enumerate(parts.values) if not np.isfinite(value)]
    if bad and np.isfinite(whole) and np.isnan(parts.values[bad[0]]):
        return (
            f"In microbatch {bad[0]} it is {parts.values[bad[0]]:.4g}: that microbatch has none of the elements over "
            f"which it is averaged. Divide by tf.maximum(count, 1), or by the number of samples"
        )
    dtype = {8: np.float64, 2: np.float16}.get(itemsize, np.float32)
    if is_equal(np.asarray(whole, dtype), np.asarray(parts.sum, dtype)):
        return (
            "It is the sum over the microbatches: a sum over samples, or one that is divided by a fixed number of "
            "samples. Average over the samples there are, with tf.reduce_mean or a division by tf.shape(y)[0]"
        )
    if divides:
        return (
            "It is divided by something that differs from microbatch to microbatch, such as the number of elements "
            "that a mask leaves. Divide by the number of all elements, or let Keras apply the mask "
            "(sample_weight, or a layer with mask_zero)"
        )
    return (
        "It is no average over samples: a part of it is a sum over samples, it compares samples with each other (as a "
        "contrastive loss does), or is computed of an average (as an F1 score is)"
    )

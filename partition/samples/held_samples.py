"""Where the dimensions of a tensor hold samples, followed through ops that only rearrange elements.

A dimension holds samples where its places, counted by some *stride*, are different samples:

    x            [n, t, d]      dimension 0: strides 1 to n
    reshaped     [n * t, d]     dimension 0: strides t to n * t   (place i belongs to sample i // t)
    reshaped     [4, n / 4, ..] dimensions 0 and 1: both hold samples

So a mean over dimension 0 mixes samples in all three, and one over the inner `t` of the second does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: The strides over which a dimension counts samples, each from one number to below another.
Strides = tuple[tuple[int, int], ...]
#: Those of each dimension of a tensor.
Dimensions = tuple[Strides, ...]
#: The lengths of dimensions; None where one is not known.
Shape = tuple[int | None, ...]


def none_of(shape: Sequence[int | None]) -> Dimensions:
    """Returns the dimensions of a tensor that holds no samples."""
    return ((),) * len(shape)


def along(axis: int, length: int, rank: int) -> Dimensions:
    """Returns the dimensions of a tensor that holds one sample after the other along one of them."""
    return tuple(((1, length),) if place == axis else () for place in range(rank))


def places(dimensions: Dimensions) -> frozenset[int]:
    """Returns the dimensions that hold samples."""
    return frozenset(place for place, strides in enumerate(dimensions) if strides)


def reshaped(dimensions: Dimensions, shape: Shape, new: Shape) -> Dimensions | None:
    """Returns where a tensor holds samples after a reshape; None where that cannot be told.

    Args:
        dimensions: where it holds them before.
        shape: its shape before.
        new: its shape afterwards.
    """
    if not places(dimensions):
        return none_of(new)
    if None in shape or None in new:
        return _reshaped_in_front(dimensions, shape, new)
    known, known_new = [d or 0 for d in shape], [d or 0 for d in new]
    flat: list[tuple[int, int]] = []
    for place, strides in enumerate(dimensions):
        inner = math.prod(known[place + 1 :])
        flat += [(low * inner, high * inner) for low, high in strides]
    found: list[Strides] = []
    for place, length in enumerate(known_new):
        inner = math.prod(known_new[place + 1 :])
        parts = []
        for low, high in flat:
            low, high = max(low, inner), min(high, inner * length)
            if low < high:
                if low % inner or high % inner:
                    return None
                parts.append((low // inner, high // inner))
        found.append(_joined(parts))
    return tuple(found)


def _reshaped_in_front(dimensions: Dimensions, shape: Shape, new: Shape) -> Dimensions | None:
    """Returns where a tensor holds samples after a reshape that leaves the dimensions with samples as they are."""
    last = max(places(dimensions))
    front = shape[: last + 1]
    if None in front or new[: last + 1] != front:
        return None
    return (*dimensions[: last + 1], *none_of(new[last + 1 :]))


def _joined(parts: Sequence[tuple[int, int]]) -> Strides:
    """Returns strides in order, those that follow each other as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if found and found[-1][1] == low:
            found[-1] = found[-1][0], high
        else:
            found.append((low, high))
    return tuple(found)


def broadcast(dimensions: Dimensions, rank: int) -> Dimensions:
    """Returns where a tensor holds samples once it has more dimensions, in front.

    Args:
        dimensions: where it holds them.
        rank: how many dimensions it has then.
    """
    return ((),) * (rank - len(dimensions)) + dimensions

"""Limits the bytes of weights that an optimizer updates at once, since each update needs temporaries of its size."""

from __future__ import annotations

from collections.abc import Iterable

#: Updates of large weights that may be under way in any case.
FEW = 2
#: So may any number that have no more than this part of all weights, so that many threads have something to do.
_PART = 8
#: Bytes from which on a weight is large. What is smaller the allocator of a CPU does not count.
LARGE = 256 << 10


def most_at_once(sizes: Iterable[int]) -> int:
    """Returns the bytes of the weights that may be under way at the same time.

    Args:
        sizes: bytes of all weights that are updated.

    Example:
        >>> most_at_once([4 << 20, 3 << 20, 2 << 20, 100])
        7340132
    """
    ordered = sorted(sizes, reverse=True)
    large = [size for size in ordered if size >= LARGE]
    return max(sum(large[:FEW]), sum(large) // _PART) + sum(ordered[len(large) :])

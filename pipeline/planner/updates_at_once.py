"""Limits the bytes of weights that an optimizer updates at once, since each update needs temporaries of its size."""

from __future__ import annotations

from collections.abc import Iterable

from smp_tf.pipeline import allocator

#: How many updates of large weights may be under way in any case.
FEW = 2
#: Updates of up to this part of all weights may also be under way, so that many threads have work.
_PART = 8
#: The bytes from which a weight is large. The allocator of a CPU does not count smaller tensors.
LARGE = allocator.LARGE


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

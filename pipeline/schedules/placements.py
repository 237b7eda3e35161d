"""Tells which rank runs which chunk, where a rank has several.

    3 ranks, 2 chunks each      looped             in a V

    rank 0                      0     3            0           5
    rank 1                        1     4            1       4
    rank 2                          2     5            2 - 3

In a V the last rank hands the middle of the model to itself, and rank 0 has both of its ends.
"""

from __future__ import annotations

from collections.abc import Callable

RanksOfChunks = Callable[[int, int], tuple[int, ...]]
"""The rank of every chunk, from (stages, chunks per rank)."""


def looped(stages: int, chunks_per_rank: int = 1) -> tuple[int, ...]:
    """Returns the ranks of chunks that are dealt out in turn, chunk c to rank c % stages.

    Args:
        stages: how many ranks share the model.
        chunks_per_rank: how many chunks each of them has.

    Returns:
        One rank per chunk.

    Example:
        >>> looped(3, 2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(stages)) * chunks_per_rank


def in_a_v(stages: int, chunks_per_rank: int = 2) -> tuple[int, ...]:
    """Returns the ranks of chunks that are dealt out there and back.

    Args:
        stages: how many ranks share the model.
        chunks_per_rank: how many chunks each of them has; 2 make a V.

    Returns:
        One rank per chunk.

    Example:
        >>> in_a_v(3)
        (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(stages))
    return tuple(rank for turn in range(chunks_per_rank) for rank in (there[::-1] if turn % 2 else there))

"""Shares of the optimizer's slots: of whole variables, about equal, the same on every rank."""

from __future__ import annotations

import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_tf.partition import slot_shares
from smp_tf.partition.slot_shares import largest_share, share_out


def test_the_examples_are_true() -> None:
    failed, tried = doctest.testmod(slot_shares)
    assert (failed, tried) == (0, 2)


@pytest.mark.parametrize(
    ("sizes", "loads", "wanted"),
    [
        ([], [0, 0], ()),
        ([5], [0, 0, 0], (0,)),
        ([1, 1, 1, 1], [0, 0], (0, 1, 0, 1)),
        ([40, 16, 16, 1], [0, 0], (0, 1, 1, 1)),
        # What replicas keep of models before.
        ([4, 4, 4], [9, 0, 1], (1, 2, 1)),
        ([3, 0, 0], [0, 0], (0, 1, 1)),
    ],
)
def test_the_largest_goes_first_to_whoever_has_least(sizes: list[int], loads: list[int], wanted: tuple[int]) -> None:
    assert share_out(sizes, loads) == wanted


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_share_is_at_most_four_thirds_of_the_best(sizes: list[int], replicas: int) -> None:
    best = min(
        max(sum(s for s, r in zip(sizes, chosen, strict=True) if r == replica) for replica in range(replicas))
        for chosen in itertools.product(range(replicas), repeat=len(sizes))
    )
    assert best <= largest_share(sizes, replicas) <= best * 4 / 3

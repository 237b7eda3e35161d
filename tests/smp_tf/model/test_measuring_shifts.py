"""Shifts in which ranks measure."""

from __future__ import annotations

import pytest

from smp_tf.model.measuring_shifts import Shifts, shifts_of


@pytest.mark.parametrize(
    ("ranks", "cores", "mine", "crowd"),
    [
        (1, 4, [{0}], 1.0),
        (2, 2, [{0}, {0}], 1.0),
        (2, 1, [{0}, {1}], 2.0),
        (3, 2, [{0, 1}, {0}, {1}], 1.5),
        (4, 2, [{0}, {0}, {1}, {1}], 2.0),
        (5, 2, [{0, 2}, {0}, {1}, {1}, {2}], 2.5),
    ],
)
def test_as_many_ranks_measure_as_there_are_processors(
    ranks: int, cores: int, mine: list[set[int]], crowd: float
) -> None:
    found = [shifts_of(rank, ["a"] * ranks, [range(cores)] * ranks) for rank in range(ranks)]
    assert found == [Shifts(len(set().union(*mine)), frozenset(each), crowd) for each in mine]


def test_all_hosts_have_as_many_shifts_and_each_its_own_crowd() -> None:
    hosts, usable = ["a", "a", "b", "a", "a", "b"], [{0, 1}] * 6
    found = [shifts_of(rank, hosts, usable) for rank in range(6)]
    assert [each.count for each in found] == [2] * 6
    # Both ranks of b measure in both shifts, and count the first time only.
    assert [sorted(each.mine) for each in found] == [[0], [0], [0, 1], [1], [1], [0, 1]]
    assert [each.crowd for each in found] == [2.0, 2.0, 1.0, 2.0, 2.0, 1.0]


def test_ranks_with_processors_of_their_own_are_not_crowded() -> None:
    assert shifts_of(1, ["a", "a"], [{0}, {1}]) == Shifts(1, frozenset({0}), 1.0)

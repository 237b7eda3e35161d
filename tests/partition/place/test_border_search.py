"""Placements by the sets of units before each border; `test_fewest_bytes` compares them with all placements."""

from __future__ import annotations

import pytest

from smp_tf.partition.place import border_search
from smp_tf.partition.place.asked import Asked
from smp_tf.partition.place.border_search import BorderSearch
from smp_tf.partition.place.cut_search import Most
from smp_tf.partition.place.placement import Chain, Chunks, Ranks
from smp_tf.partition.units.cost import Flow, Stash, Weight
from tests.partition.chains import names

#: a goes to b and to c, which d joins; e reads that.
FORK = ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4))


def asked(chain: Chain, stages: int = 2, ranks: Ranks | None = None) -> Asked:
    return Asked(chain, FORK, "memory", 4, ranks or Ranks.alike(stages), Chunks.one_each(tuple(range(stages, 0, -1))))


def fork(*weights: Weight) -> Chain:
    flows = (Flow(0, (1, 2), 9.0), Flow(1, (3,), 3.0), Flow(2, (3,), 5.0), Flow(3, (4,), 20.0))
    stashes = tuple(Stash((unit,), 1.0) for unit in range(5))
    return Chain(names(5), (1.0,) * 5, flows, stashes, weights, seconds_per_byte=0.5)


def test_the_sets_before_a_border_send_what_their_last_units_make() -> None:
    search = BorderSearch(asked(fork()), ([0] * 5, [1] * 5))
    anything, bound = search.sends_least(Most())
    assert anything is not None
    assert (anything.stage_of, bound) == ((0, 0, 0, 1, 1), 8.0)
    # The first stage keeps two of each stash.
    small, bound = search.sends_least(Most(memory=4.0))
    assert small is not None
    assert (small.stage_of, small.memory, bound) == ((0, 1, 1, 1, 1), (2.0, 4.0), 9.0)
    # Both stages take the time of the nine bytes, which the first one sends once.
    assert small.times == (1.0 + 4.5, 4.0 + 4.5)
    even, bound = search.sends_least(Most(time=8.0))
    assert even is not None
    assert (even.stage_of, even.times, bound) == ((0, 0, 0, 1, 1), (3.0 + 4.0, 2.0 + 4.0), 8.0)
    assert search.sends_least(Most(memory=2.0)) == (None, float("inf"))


def test_units_are_only_on_stages_that_are_given() -> None:
    search = BorderSearch(asked(fork()), ([0, 1, 0, 1, 1], [0, 1, 1, 1, 1]))
    found, bound = search.sends_least(Most())
    assert found is not None
    assert (found.stage_of, bound) == ((0, 1, 1, 1, 1), 9.0)


def test_a_shared_weight_is_owned_where_there_is_most_room() -> None:
    shared = Weight(0, (0, 4), 4.0, 0.0, 8.0)
    search = BorderSearch(asked(fork(shared)), ([0] * 5, [1] * 5))
    found, bound = search.sends_least(Most())
    assert found is not None
    assert (found.stage_of, bound) == ((0, 0, 0, 1, 1), 8.0 + shared.crossing / 4)
    assert found.owners == {0: 1}
    assert found.memory == (6.0 + 4.0, 2.0 + 12.0)
    limited = Ranks((1.0, 1.0), (1.0, 1.0), (20.0, 12.0))
    found, _ = BorderSearch(asked(fork(shared), ranks=limited), ([0] * 5, [1] * 5)).sends_least(Most())
    assert found is not None
    assert found.owners == {0: 0}


def test_of_many_sets_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not BorderSearch(asked(fork()), ([0] * 5, [1] * 5)).is_too_large
    # None, a, ab, ac, abc, abcd, abcde.
    for limit in ("_MOST_SETS", "_MOST_PAIRS"):
        with monkeypatch.context() as patched:
            patched.setattr(border_search, limit, 6)
            assert BorderSearch(asked(fork()), ([0] * 5, [1] * 5)).is_too_large
            patched.setattr(border_search, limit, 7)
            assert not BorderSearch(asked(fork()), ([0] * 5, [1] * 5)).is_too_large

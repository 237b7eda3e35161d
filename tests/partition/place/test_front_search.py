"""Cuts between chunks from two fronts: against all cuts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest

from smp_tf.partition.place import front_search
from smp_tf.partition.place.front_search import Fronts, FrontSearch, Level
from smp_tf.partition.place.placement import Chain, Chunks, Placement, Ranks, costed
from smp_tf.partition.place.trade import Offer
from smp_tf.partition.units.cost import Flow, Stash, Weight
from tests.partition.chains import names

#: Placements of chunks, with the numbers of stashes that each stage keeps at its fullest. "in a V" is as in ZB-V, and
#: "in turn" as in 1F1B with two chunks per stage. In the last two, one stage or two stages have a second run.
SHAPES = {
    "in a V": Chunks((0, 1, 1, 0), (({0: 3, 3: 1}, {0: 2, 3: 2}), ({1: 2, 2: 2},))),
    "in turn": Chunks((0, 1, 0, 1), (({0: 3, 2: 2},), ({1: 2, 3: 1},))),
    "both ends": Chunks((0, 1, 2, 0), (({0: 3, 3: 1},), ({1: 2},), ({2: 1},))),
    "folded": Chunks((0, 1, 2, 1, 0), (({0: 3, 4: 1},), ({1: 2, 3: 1},), ({2: 1},))),
}


def random_chain(seed: int, count: int = 9) -> Chain:
    dice = np.random.default_rng(seed)
    return Chain(
        names(count),
        tuple(float(dice.integers(1, 9)) for _ in range(count)),
        flows=tuple(Flow(unit, (unit + 1,), float(dice.integers(1, 20))) for unit in range(count - 1)),
        stashes=tuple(Stash((unit,), float(dice.integers(0, 5))) for unit in range(count)),
        weights=tuple(Weight(unit, (unit,), float(dice.integers(5, 9)), 1.0, 1.0) for unit in range(count)),
        seconds_per_byte=0.01,
    )


def all_offers(chain: Chain, chunks: Chunks, objective: str) -> Iterator[Offer]:
    count = len(chain.names)
    for cuts in combinations(range(1, count), len(chunks.placement) - 1):
        yield Offer.of(chain, made_of(chain, chunks, cuts), objective, 4)


def made_of(chain: Chain, chunks: Chunks, cuts: tuple[int, ...]) -> Placement:
    chunk_of = [sum(cut <= unit for cut in cuts) for unit in range(len(chain.names))]
    return costed(chain, chunk_of, {}, 4, chunks)


def test_the_order_in_which_stages_are_filled() -> None:
    v, turns = Fronts.of((0, 1, 1, 0)), Fronts.of((0, 1, 0, 1))
    assert v == Fronts((Level(0, 0, 3), Level(1, 1, 2)), meet=True)
    assert turns == Fronts((Level(0, 0, 2), Level(1, 1, 3)), meet=False)
    assert Fronts.of((0, 1, 2, 0)) == Fronts((Level(0, 0, 3), Level(1, 1, None), Level(2, 2, None)), meet=True)
    # Three chunks a stage, and chunks in an order of their own.
    assert Fronts.of((0, 1, 0, 1, 0, 1)) is None
    assert Fronts.of((0, 1, 2, 0, 2, 1)) is None


@pytest.mark.parametrize("objective", ["memory", "speed"])
@pytest.mark.parametrize("chunks", SHAPES.values(), ids=SHAPES.keys())
def test_no_cut_is_more_even_or_sends_less_within_a_limit(chunks: Chunks, objective: str) -> None:
    for seed in range(4):
        chain = random_chain(seed)
        offers = list(all_offers(chain, chunks, objective))
        search = FrontSearch(chain, chunks, objective, 4, Ranks.alike(chunks.stages))
        even = search.most_even((2, 4, 6, 8)[: len(chunks.placement) - 1])[-1]
        found = Offer.of(chain, made_of(chain, chunks, even), objective, 4)
        assert found.balance == pytest.approx(min(offer.balance for offer in offers))
        most = 1.2 * found.balance
        least = min(offer.sent for offer in offers if offer.balance <= most)
        few = Offer.of(chain, made_of(chain, chunks, search.sends_least(most, even)[-1]), objective, 4)
        assert few.balance <= most
        assert few.sent == pytest.approx(least)
        assert search.sends_least(0.5 * found.balance, even) == []


def test_of_many_places_those_count_where_little_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four units, with little between them: eight places are enough for the best cut of 64 units."""
    monkeypatch.setattr(front_search, "MOST_PLACES", 16)
    flows = tuple(Flow(unit, (unit + 1,), 1.0 if unit % 4 == 3 else 8.0) for unit in range(63))
    weights = tuple(Weight(unit, (unit,), 10.0, 0.0, 0.0) for unit in range(64))
    chain = Chain(names(64), (1.0,) * 64, flows, weights=weights)
    search = FrontSearch(chain, SHAPES["in a V"], "memory", 4, Ranks.alike(2))
    first, _, last = search.most_even((10, 20, 50))[-1]
    assert last - first == 32
    first, _, last = search.sends_least(330.0, (10, 20, 50))[-1]
    assert (first % 4, last % 4, last - first) == (0, 0, 32)

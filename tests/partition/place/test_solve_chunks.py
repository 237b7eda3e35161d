"""Cuts into chunks of which stages have several: against all cuts of small chains, and what is refused."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.place.place import place
from smp_tf.partition.place.placement import Chain, Chunks, Placement, Ranks, costed
from smp_tf.partition.place.solve_chunks import solve_chunks
from smp_tf.partition.units.cost import Flow, Stash, Weight
from tests.partition.chains import names

#: What ZB-V keeps on two stages.
IN_A_V = Chunks((0, 1, 1, 0), (({0: 3, 3: 1}, {0: 2, 3: 2}), ({1: 2, 2: 2},)))
BOTH_ENDS = Chunks((0, 1, 2, 0), (({0: 4, 3: 1},), ({1: 3},), ({2: 2},)))


def random_chain(seed: int, count: int = 9) -> Chain:
    dice = random.Random(seed)
    users = tuple(sorted(dice.sample(range(count), 2)))
    return Chain(
        names(count),
        tuple(dice.uniform(1, 5) for _ in range(count)),
        flows=tuple(Flow(unit, (unit + 1,), dice.uniform(0, 2)) for unit in range(count - 1)),
        stashes=tuple(Stash((unit,), dice.uniform(0, 5)) for unit in range(count)),
        weights=(
            *(Weight(unit, (unit,), dice.uniform(1, 9), 1.0, 1.0) for unit in range(count)),
            Weight(count, users, 8.0, 8.0, 8.0),
        ),
        seconds_per_byte=0.1,
    )


def all_placements(chain: Chain, chunks: Chunks) -> list[Placement]:
    """Every cut, with every end of a shared weight as its owner."""
    count = len(chain.names)
    found = []
    for cuts in combinations(range(1, count), len(chunks.placement) - 1):
        chunk_of = [sum(cut <= unit for cut in cuts) for unit in range(count)]
        shared = [w for w in chain.weights if len(w.users) > 1]
        for ends in product((0, -1), repeat=len(shared)):
            owners = {w.variable: chunk_of[w.users[end]] for w, end in zip(shared, ends, strict=True)}
            found.append(costed(chain, chunk_of, owners, 4, chunks))
    return found


@pytest.mark.parametrize("objective", ["memory", "speed"])
@pytest.mark.parametrize("chunks", [IN_A_V, BOTH_ENDS], ids=["in a V", "both ends"])
def test_what_is_found_is_the_best_cut_or_nearly(chunks: Chunks, objective: str) -> None:
    ratios = []
    for seed in range(25):
        chain = random_chain(seed)
        found = solve_chunks(chain, chunks, objective=objective, microbatches=4)
        best = min(other.score(objective, 4) for other in all_placements(chain, chunks))
        ratios.append(found.score(objective, 4) / best)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.06
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 20


def test_a_limit_is_kept_where_some_cut_keeps_it() -> None:
    for seed in range(10):
        chain = random_chain(seed)
        least = min(max(other.memory) for other in all_placements(chain, IN_A_V))
        ranks = Ranks.alike(2, least * 1.1)
        found = solve_chunks(chain, IN_A_V, objective="speed", microbatches=4, ranks=ranks)
        assert max(found.memory) <= least * 1.1
        with pytest.raises(MemoryLimitError, match=r"No cut into 4 chunks on 2 partitions fits in memory_limit. Stage"):
            solve_chunks(chain, IN_A_V, microbatches=4, ranks=Ranks.alike(2, least * 0.9))


def test_what_is_placed_by_hand_is_in_a_chunk_of_its_stage() -> None:
    chain = Chain(names(8), (1.0,) * 8, manual=(None, 1, None, None, None, 0, None, None))
    found = solve_chunks(chain, Chunks((0, 1, 0, 1), (({0: 1, 2: 1},), ({1: 1, 3: 1},))))
    with pytest.raises(PlacementError, match="agrees with the manual placements"):
        solve_chunks(
            Chain(names(4), (1.0,) * 4, manual=(1, None, None, None)), Chunks((0, 1, 0), (({0: 1, 2: 1},), ({1: 1},)))
        )
    assert found.stage_of[1] == 1
    assert found.stage_of[5] == 0


def test_what_an_earlier_step_decided_is_in_its_chunk() -> None:
    pinned = (0, None, 0, None, None, 2, None, None)
    found = solve_chunks(Chain(names(8), (1.0,) * 8, pinned=pinned), IN_A_V, objective="speed")
    assert [found.chunk_of[unit] for unit in (0, 2, 5)] == [0, 0, 2]
    assert set(found.chunk_of) == {0, 1, 2, 3}


def test_fewer_layers_than_chunks_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"has 3 units .* needs one in each of its 4 chunks on 2 partitions"):
        solve_chunks(Chain(names(3), (1.0,) * 3), IN_A_V)


@pytest.mark.parametrize("objective", ["memory", "speed"])
def test_what_is_proved_holds_for_every_cut(objective: str) -> None:
    for seed in range(10):
        chain = random_chain(seed)
        placed = place(chain, [], 2, objective=objective, microbatches=4, chunks=IN_A_V)
        assert placed.gap is not None
        bound = placed.placement.score(objective, 4) * (1 - placed.gap)
        assert all(other.score(objective, 4) >= bound - 1e-9 for other in all_placements(chain, IN_A_V))

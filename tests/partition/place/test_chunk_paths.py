"""Cuts between chunks by tolls, and what none of them is below: against all cuts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest

from smp_tf.partition.place import chunk_paths
from smp_tf.partition.place.chunk_paths import ChunkPaths
from smp_tf.partition.place.chunk_search import ChunkSearch
from smp_tf.partition.place.placement import Chain, Chunks, Ranks, costed
from smp_tf.partition.place.sure_costs import SureCosts
from smp_tf.partition.place.trade import Offer, sent_bytes
from smp_tf.partition.units.cost import Flow, Stash, Weight
from tests.partition.chains import names

#: Placements of chunks, with the numbers of stashes that each stage keeps at its fullest. "in a V" is as in ZB-V, and
#: "in turn" as in 1F1B with two chunks per stage.
SHAPES = {
    "in a V": Chunks((0, 1, 1, 0), (({0: 3, 3: 1}, {0: 2, 3: 2}), ({1: 2, 2: 2}, {1: 3, 2: 1}))),
    "in turn": Chunks((0, 1, 0, 1), (({0: 3, 2: 2},), ({1: 2, 3: 1},))),
    "three in turn": Chunks((0, 1, 0, 1, 0), (({0: 3, 2: 2, 4: 1},), ({1: 2, 3: 1},))),
    "both ends": Chunks((0, 1, 2, 0), (({0: 3, 3: 1},), ({1: 2},), ({2: 1},))),
}
UNITS, MICROBATCHES = 8, 4


def random_chain(seed: int) -> Chain:
    """Units that send to others near and far, with stashes and weights of several units."""
    dice = np.random.default_rng(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(sorted(map(int, dice.choice(UNITS, count, replace=False))))

    flows = [Flow(unit, (unit + 1,), float(dice.integers(0, 20))) for unit in range(UNITS - 1)]
    for _ in range(8):
        ends = some(int(dice.integers(2, 5)))
        producer = int(dice.choice(ends))
        flows.append(Flow(producer, tuple(unit for unit in ends if unit != producer), float(dice.integers(0, 30))))
    weights = [Weight(unit, (unit,), float(dice.integers(5, 9)), 1.0, 1.0) for unit in range(UNITS)]
    weights += [Weight(UNITS + at, some(int(dice.integers(2, 4))), 8.0, 8.0, 8.0) for at in range(dice.integers(0, 3))]
    stashes = [Stash((unit,), float(dice.integers(0, 5))) for unit in range(UNITS)]
    stashes += [Stash(some(3), 4.0) for _ in range(3)]
    by_hand = tuple(0 if unit == 3 else None for unit in range(UNITS)) if dice.random() < 0.3 else ()
    times = tuple(float(dice.integers(1, 5)) for _ in range(UNITS))
    return Chain(
        names(UNITS), times, tuple(flows), tuple(stashes), tuple(weights), manual=by_hand, seconds_per_byte=0.01
    )


def all_cuts(chain: Chain, chunks: Chunks) -> list[tuple[int, ...]]:
    """Every cut that agrees with what a script has placed."""
    manual = chain.manual or (None,) * UNITS
    return [
        cuts
        for cuts in combinations(range(1, UNITS), len(chunks.placement) - 1)
        if all(stage in (None, chunks.placement[chunk]) for stage, chunk in zip(manual, chunks_of(cuts), strict=True))
    ]


def chunks_of(cuts: tuple[int, ...]) -> list[int]:
    return [sum(cut <= unit for cut in cuts) for unit in range(UNITS)]


def offers_of(
    chain: Chain, chunks: Chunks, cuts: tuple[int, ...], objective: str, ranks: Ranks
) -> Iterator[tuple[Offer, tuple[float, ...]]]:
    """What a cut has to offer, and the bytes of its stages, with every owner of shared weights."""
    chunk_of = chunks_of(cuts)
    shared = [weight for weight in chain.weights if len(weight.users) > 1]
    for owners in product(*[sorted({chunk_of[user] for user in weight.users}) for weight in shared]):
        owner_of = {weight.variable: owner for weight, owner in zip(shared, owners, strict=True)}
        made = costed(chain, chunk_of, owner_of, MICROBATCHES, chunks, ranks)
        yield Offer.of(chain, made, objective, MICROBATCHES), made.memory


def sent_of(made: tuple[Offer, tuple[int, ...]]) -> float:
    return made[0].sent


def unequal(chunks: Chunks, memory: tuple[float, ...]) -> Ranks:
    """Ranks of unequal speed, of which the first may need little more than some bytes."""
    speed = tuple(1.0 + stage for stage in range(chunks.stages))
    return Ranks(speed, speed[::-1], (1.05 * memory[0], *(None,) * (chunks.stages - 1)))


@pytest.mark.parametrize("objective", ["memory", "speed"])
@pytest.mark.parametrize("chunks", SHAPES.values(), ids=SHAPES.keys())
def test_no_cut_within_a_limit_sends_less_than_the_bound(
    chunks: Chunks, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_over_least, bound_over_least = [], []
    for seed in range(6):
        chain, ranks = random_chain(seed), Ranks.alike(chunks.stages)
        cuts = all_cuts(chain, chunks)
        if seed % 2:
            offers = [offer for at in cuts for offer in offers_of(chain, chunks, at, objective, ranks)]
            ranks = unequal(chunks, min(offers, key=lambda pair: pair[0].balance)[1])
        limits = [math.inf if limit is None else limit for limit in ranks.memory]
        made = [
            (offer, at)
            for at in cuts
            for offer, memory in offers_of(chain, chunks, at, objective, ranks)
            if all(held <= limit for held, limit in zip(memory, limits, strict=True))
        ]
        load = 1.15 * min(offer.balance for offer, _ in made)
        within = [(offer, at) for offer, at in made if offer.balance <= load]
        least = min(offer.sent for offer, _ in within)
        search = ChunkSearch(chain, chunks, objective, MICROBATCHES, ranks)
        paths = ChunkPaths(chain, chunks, objective, MICROBATCHES, ranks, search)
        looked = search.look(np.asarray(cuts))
        fits = (looked.over <= 0) & (looked.load.max(axis=1) <= load)
        known = [at for at, does in zip(cuts, fits, strict=True) if does] or [max(within, key=sent_of)[1]]
        even, share = paths.most_even(known[-1])
        assert 0 < share <= 1
        assert even in known
        for many in (3_000, 2):
            with monkeypatch.context() as patched:
                patched.setattr(chunk_paths, "_MOST_PATHS", many)
                patched.setattr(chunk_paths, "_LEAST_PATHS", many)
                found, bound = paths.sends_least(load, math.inf, known[-1])
            sent = sent_bytes(chain, [chunks.placement[chunk] for chunk in chunks_of(found)], MICROBATCHES)
            assert found in known
            assert bound / MICROBATCHES <= least * (1 + 1e-9)
            if many > 2:
                found_over_least.append(sent / least)
                bound_over_least.append(bound / MICROBATCHES / least)
    # A run's costs do not know of another one of its stage.
    assert np.mean(found_over_least) <= 1.25, found_over_least
    assert np.mean(bound_over_least) >= 0.8, bound_over_least


@pytest.mark.parametrize("chunks", SHAPES.values(), ids=SHAPES.keys())
def test_sure_costs_of_runs_add_up_to_no_more_than_stages_receive(chunks: Chunks) -> None:
    alike = 0
    for seed in range(8):
        chain = random_chain(seed)
        costs = SureCosts(chain, chunks, MICROBATCHES)
        search = ChunkSearch(chain, chunks, "memory", MICROBATCHES, Ranks.alike(chunks.stages))
        for cuts in all_cuts(chain, chunks):
            bounds = (0, *cuts, UNITS)
            sure = sum(costs.sent[at][bounds[run.first], bounds[run.last + 1]] for at, run in enumerate(costs.runs))
            stage_of = [chunks.placement[chunk] for chunk in chunks_of(cuts)]
            sent = MICROBATCHES * sent_bytes(chain, stage_of, MICROBATCHES)
            assert search.sent(np.asarray([cuts]))[0] == pytest.approx(sent)
            assert sure <= sent * (1 + 1e-9)
            alike += sure == pytest.approx(sent)
    assert alike > 0


def test_what_two_runs_of_a_stage_may_share_is_not_counted() -> None:
    """A tensor of u1 that u3 and u6 read, on stages (0, 1, 0)."""
    chunks = Chunks((0, 1, 0), (({0: 1, 2: 1},), ({1: 1},)))
    costs = SureCosts(Chain(names(8), (1.0,) * 8, (Flow(1, (3, 6), 5.0),)), chunks, 1)
    first, second, third = costs.sent
    assert second[2, 5] == 5.0
    assert second[1, 5] == 0.0
    assert second[4, 6] == 0.0
    # The first run of stage 0 may have made it, if there is a unit between the two.
    assert third[2, 8] == 5.0
    assert third[3, 8] == third[5, 8] == 0.0
    assert first[0, 2] == 0.0
    assert math.isinf(first[1, 2])


def test_a_shared_weight_is_counted_by_the_last_run() -> None:
    """u0 and u7 use it, so that both stages do, whatever is cut where; u4 may be on either."""
    chunks = Chunks((0, 1, 0, 1), (({0: 1, 2: 1},), ({1: 1, 3: 1},)))
    weight = Weight(0, (0, 4, 7), 8.0, 0.0, 0.0)
    costs = SureCosts(Chain(names(8), (1.0,) * 8, weights=(weight,)), chunks, 1)
    assert [run.begins for run in costs.runs] == [0, 1, 0, 1]
    assert [costs.sent[3][begin, 8] for begin in (3, 5, 7)] == [weight.crossing] * 3
    assert costs.sent[1][1, 5] == 0.0
    assert (costs.weights[-1], costs.owned) == (weight.copied, weight.stored - weight.copied)

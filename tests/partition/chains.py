"""Random chains and graphs of units for the tests of the solvers, and what placements of them cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from smp_tf.partition.place.placement import Chain, Ranks
from smp_tf.partition.place.solve_dag import DagProblem
from smp_tf.partition.units.cost import Flow, Stash, Weight

Needs = Sequence[tuple[int, int]]


def names(count: int) -> tuple[str, ...]:
    """So many names."""
    return tuple(f"u{i}" for i in range(count))


amount = st.integers(0, 20).map(float)


@cache
def _records(count: int) -> tuple[st.SearchStrategy[list[Any]], ...]:
    """Flows, stashes, weights and times of so many units; to make these strategies takes as long as to draw."""
    unit = st.integers(0, count - 1)

    def some(users: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
        return st.sets(unit, min_size=1, max_size=users).map(lambda s: tuple(sorted(s)))

    return (
        st.lists(st.tuples(unit, some(), amount), max_size=5),
        st.lists(st.tuples(some(), amount), max_size=4),
        st.lists(st.tuples(some(3), amount, amount, amount), max_size=3),
        st.lists(amount, min_size=count, max_size=count),
    )


@st.composite
def chains(draw: st.DrawFn, most: int = 7) -> Chain:
    """Random chains, small enough to look at all their placements."""
    count = draw(st.integers(1, most))
    flows, stashes, weights, times = (draw(records) for records in _records(count))
    return Chain(
        names(count),
        tuple(times),
        tuple(
            Flow(producer, tuple(c for c in readers if c != producer), size)
            for producer, readers, size in flows
            if set(readers) != {producer}
        ),
        tuple(Stash(*s) for s in stashes),
        tuple(Weight(variable, *w) for variable, w in enumerate(weights)),
        seconds_per_byte=0.5,
    )


def slow_costs(
    chain: Chain,
    stage: Sequence[int],
    late: frozenset[int],
    in_flight: Sequence[int],
    microbatches: int,
    ranks: Ranks | None = None,
) -> tuple[list[float], list[float]]:
    """Time and memory of every stage, straight from what the records mean."""
    stages = len(in_flight)
    ranks = ranks or Ranks.alike(stages)
    times, moved, memory = [0.0] * stages, [0.0] * stages, [0.0] * stages
    for u, seconds in enumerate(chain.times):
        times[stage[u]] += seconds
    for flow in chain.flows:
        ahead = {stage[c] for c in flow.consumers if c > flow.producer} - {stage[flow.producer]}
        behind = {stage[c] for c in flow.consumers if c < flow.producer} - {stage[flow.producer]}
        for away in (ahead, behind):
            if away:
                moved[stage[flow.producer]] += flow.nbytes
            for k in away:
                moved[k] += flow.nbytes
    for stash in chain.stashes:
        for k in {stage[r] for r in stash.readers}:
            memory[k] += stash.nbytes * in_flight[k]
    for weight in chain.weights:
        used = {stage[u] for u in weight.users}
        owner = stage[weight.users[-1 if weight.variable in late else 0]]
        for k in used:
            memory[k] += weight.value + weight.gradient + (weight.slots if k == owner else 0.0)
            if len(used) > 1:
                crossing = weight.value + (weight.value if weight.gradient else 0.0)
                moved[k] += crossing / microbatches
    seconds = [
        computing / speed + nbytes * chain.seconds_per_byte / link
        for computing, nbytes, speed, link in zip(times, moved, ranks.speed, ranks.link, strict=True)
    ]
    return seconds, memory


@st.composite
def unequal_ranks(draw: st.DrawFn, memory: Sequence[float]) -> Ranks:
    """Ranks of unequal speed, with limits about the memory that stages have in some placement."""
    rates = st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * len(memory))
    shares = [draw(st.sampled_from([None, 0.5, 1.0, 1.0, 1.25])) for _ in memory]
    limits = (share if share is None else share * held for share, held in zip(shares, memory, strict=True))
    return Ranks(draw(rates), draw(rates), tuple(limits))


@st.composite
def some_by_hand(draw: st.DrawFn, stage_of: Sequence[int]) -> tuple[int | None, ...]:
    """The stages of one or two units of some placement."""
    chosen = draw(st.sets(st.integers(0, len(stage_of) - 1), min_size=1, max_size=2))
    return tuple(int(stage) if unit in chosen else None for unit, stage in enumerate(stage_of))


def problem(chain: Chain, needs: Needs, stages: int, **options: Any) -> DagProblem:
    """A problem with its defaults."""
    return DagProblem(chain, tuple(needs), stages, **options)


def placements(count: int, needs: Needs, stages: int) -> np.ndarray:
    """All that leave no stage empty: a row for each, with the stage of every unit."""
    every = np.array(list(product(range(stages), repeat=count)))
    kept = np.all([(every == stage).any(axis=1) for stage in range(stages)], axis=0)
    for before, after in needs:
        kept &= every[:, before] <= every[:, after]
    return every[kept]


def costs_of_all(one: DagProblem, every: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step time of each placement, and the bytes of its fullest stage, with the best owners; infinite where limits, or
    stages given by hand, rule it out.

    Like `slow_costs`, but with all placements in one array, for each unit and stage whether it is there.
    """
    chain, held = one.chain, np.array(one.in_flight)
    ranks = one.ranks or Ranks.alike(one.stages)
    limits = np.array([np.inf if limit is None else limit for limit in ranks.memory])
    there = every[:, :, None] == np.arange(one.stages)
    times = (there * np.array(chain.times)[:, None]).sum(axis=1)
    memory, moved = np.zeros_like(times), np.zeros_like(times)
    for flow in chain.flows:
        at = there[:, flow.producer]
        for side in (
            [c for c in flow.consumers if c > flow.producer],
            [c for c in flow.consumers if c < flow.producer],
        ):
            away = there[:, side].any(axis=1) & ~at
            moved += (away | (at & away.any(axis=1, keepdims=True))) * flow.nbytes
    for stash in chain.stashes:
        memory += there[:, list(stash.readers)].any(axis=1) * held * stash.nbytes
    used_by = [there[:, list(weight.users)].any(axis=1) for weight in chain.weights]
    for weight, used in zip(chain.weights, used_by, strict=True):
        memory += used * (weight.value + weight.gradient)
        crossing = weight.value + (weight.value if weight.gradient else 0.0)
        crosses = used.sum(axis=1, keepdims=True) > 1
        moved += (used & crosses) * crossing / one.microbatches
    fullest = np.full(len(every), np.inf)
    for owners in product(range(one.stages), repeat=len(chain.weights)):
        whole, possible = memory.copy(), np.ones(len(every), bool)
        for weight, used, owner in zip(chain.weights, used_by, owners, strict=True):
            whole[:, owner] += weight.slots
            possible &= used[:, owner]
        possible &= (whole <= limits).all(axis=1)
        fullest = np.where(possible, np.minimum(fullest, whole.max(axis=1)), fullest)
    for unit, stage in enumerate(chain.manual):
        if stage is not None:
            fullest[every[:, unit] != stage] = np.inf
    times = times / np.array(ranks.speed) + moved * chain.seconds_per_byte / np.array(ranks.link)
    steps = times.sum(axis=1) + (one.microbatches - 1) * times.max(axis=1)
    return np.where(np.isinf(fullest), np.inf, steps), fullest


def fullest(chain: Chain, stage_of: Sequence[int], in_flight: Sequence[int]) -> float:
    """Bytes of the fullest stage, with the best owners, as `slow_costs` has them."""
    light = replace(chain, weights=tuple(replace(weight, slots=0.0) for weight in chain.weights))
    _, memory = slow_costs(light, stage_of, frozenset(), in_flight, 1)
    choices = [sorted({stage_of[user] for user in weight.users}) for weight in chain.weights]
    found = []
    for owners in product(*choices):
        whole = list(memory)
        for weight, owner in zip(chain.weights, owners, strict=True):
            whole[owner] += weight.slots
        found.append(max(whole))
    return min(found)


@st.composite
def graphs(draw: st.DrawFn) -> DagProblem:
    """A random graph to place; half of them on ranks that differ, some with stages given by hand."""
    chain = draw(chains(most=6))
    stages = min(draw(st.integers(1, 3)), len(chain.names))
    microbatches = draw(st.sampled_from([1, 4]))
    needs = [(f.producer, c) for f in chain.flows for c in f.consumers if c > f.producer]
    in_flight = tuple(min(stages - r, microbatches) for r in range(stages))
    one = problem(chain, needs, stages, microbatches=microbatches, in_flight=in_flight)
    if draw(st.booleans()):
        return one
    every = placements(len(chain.names), needs, stages)
    some = every[draw(st.integers(0, len(every) - 1))].tolist()
    ranks = draw(unequal_ranks(slow_costs(chain, some, frozenset(), in_flight, microbatches)[1]))
    by_hand = draw(some_by_hand(some)) if draw(st.booleans()) else ()
    return replace(one, chain=replace(chain, manual=by_hand), ranks=ranks)

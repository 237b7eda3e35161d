"""On which stages units can be: literal cases, and all placements of random small graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_tf.partition.place.asked import Asked
from smp_tf.partition.place.place import _Tight
from smp_tf.partition.place.placement import Chain, Chunks, Ranks, costed
from smp_tf.partition.place.solve_dag import DagProblem, solve_dag
from smp_tf.partition.place.stage_limits import StageLimits
from smp_tf.partition.units.cost import Stash, Weight
from tests.partition.chains import fullest, graphs, names, placements, problem, slow_costs

FORK = [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)]


def of_times(*seconds: float, needs: list[tuple[int, int]], stages: int = 2) -> StageLimits:
    chain = Chain(names(len(seconds)), seconds)
    return StageLimits(chain, needs, (1,) * stages, Ranks.alike(stages), "speed")


def test_units_are_where_what_comes_before_and_behind_them_leaves_room() -> None:
    limits = of_times(4.0, 5.0, 4.0, 2.0, 3.0, needs=FORK)
    assert limits.within(10.0) == ([0, 0, 1, 1, 1], [0, 0, 1, 1, 1])
    # Either branch fits beside what comes before it, and not both; behind them there is room for both.
    assert limits.within(13.0) == ([0, 0, 0, 0, 1], [0, 0, 1, 1, 1])
    assert limits.within(8.9) is None


def test_a_bound_is_what_no_placement_is_below() -> None:
    limits = of_times(4.0, 5.0, 4.0, 2.0, 3.0, needs=FORK)
    assert limits.least(0.0, 9.0, 0.1) == pytest.approx(8.9)
    assert 8.9 < limits.least(0.0, 20.0, 0.0) <= 9.0


def test_a_unit_that_is_surely_on_a_stage_leaves_less_room_for_others() -> None:
    # d fills a stage and c goes with it, so b comes before; a, which could be anywhere, fits beside b alone.
    limits = of_times(5.0, 5.0, 1.0, 8.0, needs=[(1, 2), (2, 3)])
    assert limits.within(9.5) is None
    assert limits.within(10.0) == ([0, 0, 1, 1], [0, 0, 1, 1])


def test_stashes_count_as_often_as_a_stage_holds_them_and_once_for_all_their_readers() -> None:
    chain = Chain(names(3), (0.0,) * 3, stashes=(Stash((0, 1), 2.0), Stash((2,), 3.0)))
    limits = StageLimits(chain, [(0, 1), (1, 2)], (2, 1), Ranks.alike(2), "memory")
    assert limits.within(4.0) == ([0, 0, 1], [0, 0, 1])
    assert limits.within(5.0) == ([0, 0, 1], [1, 1, 1])
    assert limits.within(3.9) is None


def test_bytes_that_ranks_may_need_hold_where_seconds_are_limited() -> None:
    weights = (Weight(0, (0,), 6.0, 0.0, 0.0), Weight(1, (1,), 6.0, 0.0, 0.0))
    chain = Chain(names(2), (1.0, 1.0), weights=weights)
    ranks = Ranks((1.0, 1.0), (1.0, 1.0), (8.0, None))
    assert StageLimits(chain, [(0, 1)], (1, 1), ranks, "speed").within(2.0) == ([0, 1], [1, 1])


def test_solvers_look_at_no_other_stages() -> None:
    chain = Chain(names(3), (1.0, 5.0, 1.0))
    best = problem(chain, [], 2, objective="speed", microbatches=100)
    free, bound = solve_dag(best), solve_dag(replace(best, within=([1, 0, 1], [1, 0, 1])))
    assert free is not None
    assert bound is not None
    assert max(free.times) == 5.0
    assert bound.stage_of == (1, 0, 1)
    worse = solve_dag(replace(best, within=([0, 0, 1], [0, 0, 1])))
    assert worse is not None
    assert worse.times == (6.0, 1.0)


some_speed = st.sampled_from([0.5, 1.0, 2.0])


@st.composite
def ranks_of(draw: st.DrawFn, stages: int) -> Ranks:
    """Ranks that differ, some with a limit."""
    each = st.tuples(some_speed, some_speed, st.sampled_from([None, 60.0, 120.0]))
    return Ranks(*zip(*(draw(each) for _ in range(stages)), strict=True))


@given(graphs(), st.data(), st.sampled_from(["memory", "speed"]))
def test_what_is_proved_holds_for_every_placement(asked: DagProblem, data: st.DataObject, objective: str) -> None:
    ranks, held = data.draw(ranks_of(asked.stages)), asked.in_flight or ()
    chunks = Chunks.one_each(held)
    scores = []
    for at in placements(len(asked.chain.names), asked.needs, asked.stages):
        choices = [{at[user] for user in weight.users} for weight in asked.chain.weights]
        for owners in product(*choices):
            decided = {w.variable: owner for w, owner in zip(asked.chain.weights, owners, strict=True)}
            found = costed(asked.chain, at, decided, asked.microbatches, chunks, ranks)
            if all(most is None or has <= most for has, most in zip(found.memory, ranks.memory, strict=True)):
                scores.append(found.score(objective, asked.microbatches))
    if not scores:
        return
    tight = _Tight(Asked(asked.chain, asked.needs, objective, asked.microbatches, ranks, chunks))
    best, worst = min(scores), max(scores)
    assert tight.bound(0.0, worst, 0.0) <= best * (1 + 1e-9)
    assert tight.bound(0.0, 2 * worst + 1.0, 0.0) <= best * (1 + 1e-9)


@given(graphs(), st.data())
def test_no_placement_within_a_limit_is_elsewhere(asked: DagProblem, data: st.DataObject) -> None:
    held = asked.in_flight or ()
    every = np.array(list(placements(len(asked.chain.names), asked.needs, asked.stages)))
    for objective in ("memory", "speed"):
        if objective == "memory":
            needed = np.array([fullest(asked.chain, at, held) for at in every])
        else:
            needed = np.array(
                [max(slow_costs(asked.chain, at, frozenset(), held, asked.microbatches)[0]) for at in every]
            )
        limits = StageLimits(asked.chain, asked.needs, held, Ranks.alike(asked.stages), objective)
        limit = data.draw(st.sampled_from(sorted(set(needed))))
        found = limits.within(limit)
        assert found is not None
        first, last = found
        there = every[needed <= limit]
        assert (there >= first).all()
        assert (there <= last).all()
        assert limits.least(0.0, 2.0 * float(needed.max()) + 1.0, 0.0) <= needed.min() * (1 + 1e-9)

"""On which stages units can be: literal cases, and all placements of random small graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_tf.partition.cost import Stash, Weight
from smp_tf.partition.placement import Chain, Ranks
from smp_tf.partition.solve_dag import DagProblem, solve_dag
from smp_tf.partition.stage_limits import StageLimits

from .chains import fullest, graphs, names, placements, problem, slow_costs

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
        assert limits.least(0.0, float(needed.min()), 0.0) <= needed.min()

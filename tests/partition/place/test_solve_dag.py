"""Placing the units of a graph: literal cases, public workloads, and brute force on random small graphs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.place.placement import Chain, Ranks, step_time
from smp_tf.partition.place.solve_chain import solve_chain
from smp_tf.partition.place.solve_dag import DagProblem, DagSolution, solve_dag, solve_dags
from smp_tf.partition.units.cost import Flow, Stash, Weight
from tests.partition.chains import Needs, costs_of_all, fullest, graphs, names, placements, problem, slow_costs
from tests.partition.workloads import workload

#: Microbatches of which only the slowest stage counts.
MANY = 10**9


def solved(chain: Chain, needs: Needs, stages: int, **options: Any) -> DagSolution:
    found = solve_dag(problem(chain, needs, stages, **options))
    assert found is not None
    return found


def test_branches_part_where_no_cut_of_one_order_can() -> None:
    # a ─▶ c and b ─▶ d, each with a tensor that is dear to send.
    flows = (Flow(0, (2,), 100.0), Flow(1, (3,), 100.0))
    chain = Chain(names(4), (1.0,) * 4, flows, seconds_per_byte=1.0)
    found = solved(chain, [(0, 2), (1, 3)], 2, objective="speed")
    assert found.stage_of in ((0, 1, 0, 1), (1, 0, 1, 0))
    assert found.times == (2.0, 2.0)
    assert found.bound == pytest.approx(4.0)
    assert max(solve_chain(chain, 2, objective="speed").times) > 100.0


def test_data_flows_to_later_stages_only() -> None:
    chain = Chain(names(3), (1.0, 5.0, 1.0))
    assert solved(chain, [(0, 1), (1, 2)], 3, objective="speed").stage_of == (0, 1, 2)
    assert solved(chain, [(2, 1), (1, 0)], 3, objective="speed").stage_of == (2, 1, 0)


def test_stages_that_are_given_are_kept() -> None:
    chain = Chain(names(4), (1.0,) * 4, manual=(None, None, 0, None))
    found = solved(chain, [(0, 1), (1, 2), (2, 3)], 2, objective="speed")
    assert found.stage_of == (0, 0, 0, 1)


def test_a_shared_weight_is_owned_by_any_of_its_users() -> None:
    weights = (Weight(0, (0, 1, 2), 10.0, 0.0, 30.0), Weight(1, (0,), 25.0, 0.0, 0.0), Weight(2, (2,), 25.0, 0.0, 0.0))
    chain = Chain(names(3), (1.0,) * 3, weights=weights)
    # A chain lets the first or the last have it, and one of them 65 bytes.
    assert max(solve_chain(chain, 3, objective="memory", tolerance=0.0).memory) == 65.0
    found = solved(chain, [(0, 1), (1, 2)], 3)
    assert (max(found.memory), found.owners[0]) == (40.0, 1)


def test_the_memory_limit_is_kept() -> None:
    weights = tuple(Weight(i, (i,), float(size), 0.0, 0.0) for i, size in enumerate((9, 1, 1, 1)))
    chain = Chain(names(4), (1.0, 1.0, 1.0, 1.0), weights=weights)
    order = [(0, 1), (1, 2), (2, 3)]
    assert solved(chain, order, 2, objective="speed", microbatches=8).times == (2.0, 2.0)
    limited = solved(chain, order, 2, objective="speed", microbatches=8, ranks=Ranks.alike(2, 9.0))
    assert limited.times == (1.0, 3.0)
    assert solve_dag(problem(chain, order, 2, objective="speed", ranks=Ranks.alike(2, 8.0))) is None


def test_ranks_differ_in_speed_and_in_what_they_may_need() -> None:
    weights = tuple(Weight(i, (i,), 1.0, 0.0, 0.0) for i in range(6))
    chain = Chain(names(6), (1.0,) * 6, weights=weights)
    order = [(n, n + 1) for n in range(5)]
    fast = Ranks((1.0, 2.0), (1.0, 1.0), (None, None))
    assert solved(chain, order, 2, objective="speed", microbatches=8, ranks=fast).times == (2.0, 2.0)
    small = Ranks((1.0, 2.0), (1.0, 1.0), (None, 3.0))
    found = solved(chain, order, 2, objective="speed", microbatches=8, ranks=small)
    assert (found.times, found.memory) == ((3.0, 1.5), (3.0, 3.0))


def test_stashes_weigh_as_often_as_they_are_in_flight() -> None:
    chain = Chain(names(4), (1.0,) * 4, stashes=tuple(Stash((i,), 10.0) for i in range(4)))
    found = solved(chain, [(0, 1), (1, 2), (2, 3)], 2, in_flight=(3, 1))
    assert (found.stage_of, found.memory) == ((0, 1, 1, 1), (30.0, 30.0))


def test_what_is_too_large_to_prove_is_told() -> None:
    with pytest.raises(PlacementError, match="here are 4000 units on 32 partitions"):
        solve_dag(problem(Chain(names(4000), (1.0,) * 4000), [], 32, objective="speed"))


def test_a_solver_that_fails_is_told_with_its_last_line() -> None:
    with pytest.raises(PlacementError, match=r"the solver ended with status 1: .*IndexError"):
        solve_dag(problem(Chain(names(2), (1.0,) * 2), [(0, 7)], 2))


def test_a_solver_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(PlacementError, match=r"the solver cannot be started: .*/no/such/python"):
        solve_dag(problem(Chain(names(2), (1.0,) * 2), [], 2))


def test_a_solver_that_says_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[solve_dag.__module__], "_RUN", "print('a warning of some library')")
    with pytest.raises(PlacementError, match="the solver did not answer in JSON: 'a warning of some library"):
        solve_dag(problem(Chain(names(2), (1.0,) * 2), [], 2))


def test_without_or_tools_a_placement_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlacementError, match=r"OR-tools is not installed \(pip install ortools\)"):
        solve_dag(problem(Chain(names(2), (1.0,) * 2), [], 2))


def test_the_same_graph_gives_the_same_placement() -> None:
    chain = Chain(names(30), tuple(1.0 + 7 * n % 5 for n in range(30)))
    needs = [(n, n + step) for n in range(26) for step in (1, 4)]
    first, second = (solved(chain, needs, 4, objective="speed") for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("name", "proved"), [("bert24_inference", 17.790), ("gnmt_inference", 32.911), ("gnmt_training", 107.004)]
)
def test_public_workloads_are_solved_and_proved(name: str, proved: float) -> None:
    given = workload(name)
    start = solve_chain(given.chain, given.stages, objective="speed", microbatches=MANY, tolerance=0.0)
    found = solved(given.chain, given.needs, given.stages, objective="speed", microbatches=MANY, hint=start.stage_of)
    assert max(found.times) == pytest.approx(proved, abs=6e-4)
    assert found.bound == pytest.approx(found.score("speed", MANY), rel=1e-5)
    assert found.times == pytest.approx(given.loads(found.stage_of))


def random_graphs(count: int) -> list[DagProblem]:
    """So many, drawn one by one: a list of a hundred is mostly larger than what hypothesis draws, and thrown away."""
    drawn: list[DagProblem] = []

    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(graphs())
    def draw(one: DagProblem) -> None:
        drawn.append(one)

    draw()
    return drawn


def test_no_placement_is_better() -> None:
    # All at a time, since the solver's start takes longer than they do.
    asked = random_graphs(500)
    fastest = solve_dags([replace(one, objective="speed") for one in asked])
    smallest = solve_dags([replace(one, objective="memory") for one in asked])
    impossible = by_hand = limited = 0
    for one, fast, small in zip(asked, fastest, smallest, strict=True):
        held, ranks = one.in_flight or (), one.ranks or Ranks.alike(one.stages)
        every = placements(len(one.chain.names), one.needs, one.stages)
        steps, sizes = costs_of_all(one, every)
        if np.isinf(steps).all():
            assert fast is small is None, one
            impossible += 1
            continue
        assert fast is not None, one
        assert small is not None, one
        by_hand += bool(one.chain.manual)
        limited += bool(np.isinf(sizes).any())

        def found(placed: DagSolution, costs: np.ndarray, every: np.ndarray = every) -> float:
            return costs[(every == placed.stage_of).all(axis=1)].item()

        best = pytest.approx(min(steps), rel=1e-5, abs=1e-6)
        times, _ = slow_costs(one.chain, fast.stage_of, frozenset(), held, one.microbatches, ranks)
        assert found(fast, steps) == pytest.approx(step_time(times, one.microbatches))
        assert (found(fast, steps), fast.score("speed", one.microbatches), fast.bound) == (best,) * 3, one
        limits = [np.inf if limit is None else limit for limit in ranks.memory]
        for placed in (fast, small):
            assert all(nbytes <= limit for nbytes, limit in zip(placed.memory, limits, strict=True)), one

        least = pytest.approx(min(sizes), rel=1e-5, abs=1e-6)
        if one.ranks is None:
            assert found(small, sizes) == pytest.approx(fullest(one.chain, small.stage_of, held))
        assert (found(small, sizes), max(small.memory), small.bound) == (least,) * 3, one
    # Not all alike.
    assert min(impossible, by_hand, limited) > 10

"""Which placement is taken, and what is said to be proved of it."""

from __future__ import annotations

import importlib.util

import pytest

from smp_tf.partition.errors import MemoryLimitError
from smp_tf.partition.place import place as placing
from smp_tf.partition.place.asked import Effort, near
from smp_tf.partition.place.place import place
from smp_tf.partition.place.placement import Chain, Chunks, Ranks
from smp_tf.partition.place.solve_chain import solve_chain
from smp_tf.partition.units.cost import Flow, Weight
from tests.partition.chains import names


def weighing(*sizes: float) -> Chain:
    """Units that store so much."""
    weights = tuple(Weight(unit, (unit,), size, 0.0, 0.0) for unit, size in enumerate(sizes))
    return Chain(names(len(sizes)), (1.0,) * len(sizes), weights=weights)


def follow(count: int) -> list[tuple[int, int]]:
    return [(unit, unit + 1) for unit in range(count - 1)]


def test_units_that_follow_one_another_are_cut_and_the_best_cut_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "solve_dag", None)  # it is not asked
    found = place(weighing(4.0, 2.0, 4.0, 2.0), follow(4), 3, effort=Effort(seconds=1.0))
    assert (found.placement.memory, found.gap, found.without) == ((4.0, 2.0, 6.0), 0.0, None)


def test_of_few_cuts_into_several_chunks_of_layers_in_a_row_the_best_is_proved() -> None:
    """Up to 60 % were said to be possible of eight layers, all cuts of which had been looked at."""
    chunks = Chunks((0, 1, 1, 0), (({0: 3, 3: 1}, {0: 2, 3: 2}), ({1: 2, 2: 2},)))
    chain = weighing(7.0, 1.0, 1.0, 1.0, 1.0)
    found = place(chain, follow(5), 2, chunks=chunks)
    assert (max(found.placement.memory), found.gap) == (8.0, 0.0)
    # Where a layer does not need the one before it, another order may be better.
    assert (place(chain, follow(5)[1:], 2, chunks=chunks).gap or 0.0) > 0.1


def test_branches_are_placed_side_by_side_where_that_is_better() -> None:
    chain = weighing(4.0, 2.0, 4.0, 2.0, 1.0)
    join = [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert max(solve_chain(chain, 3).memory) == 6.0
    found = place(chain, join, 3, effort=Effort(seconds=1.0))
    assert max(found.placement.memory) == 5.0
    assert found.gap == pytest.approx(0.0, abs=1e-6)
    assert found.without is None


@pytest.mark.parametrize("objective", ["memory", "speed"])
def test_a_limit_within_which_no_cut_keeps_is_kept_by_branches_side_by_side(objective: str) -> None:
    """It was refused: only cuts were looked at for one that fits."""
    chain = weighing(4.0, 2.0, 4.0, 2.0, 1.0)
    join = [(0, 4), (1, 4), (2, 4), (3, 4)]
    found = place(
        chain, join, 3, objective=objective, microbatches=4, ranks=Ranks.alike(3, 5.0), effort=Effort(seconds=1.0)
    )
    assert max(found.placement.memory) == 5.0
    assert found.gap == pytest.approx(0.0, abs=1e-6)
    for limit, seconds in ((5.0, 0.0), (4.0, 1.0)):
        with pytest.raises(MemoryLimitError, match="No cut into 3 partitions fits in memory_limit"):
            place(chain, join, 3, objective=objective, ranks=Ranks.alike(3, limit), effort=Effort(seconds=seconds))


def test_a_cut_that_no_placement_can_beat_needs_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "solve_dag", None)
    found = place(weighing(3.0, 3.0, 3.0, 3.0), [(0, 3)], 2, effort=Effort(seconds=1.0))
    assert (found.placement.memory, found.gap) == ((6.0, 6.0), 0.0)


def test_what_others_could_gain_is_told_of_a_placement_by_hand_too() -> None:
    """It was told of none: a person who pins a layer wants to know what that costs."""
    weights = weighing(4.0, 2.0, 4.0, 2.0).weights
    by_hand = place(
        Chain(names(4), (1.0,) * 4, weights=weights, manual=(0, None, 0, None)),
        follow(4),
        2,
        effort=Effort(seconds=1.0),
    )
    assert by_hand.placement.memory == (10.0, 2.0)
    assert by_hand.gap == pytest.approx(0.4)


def test_nothing_is_proved_where_an_earlier_step_has_placed_units() -> None:
    chain = Chain(names(3), (1.0,) * 3, weights=weighing(1.0, 1.0, 8.0).weights, pinned=(0, 1, 1))
    assert place(chain, follow(3), 2, effort=Effort(seconds=1.0)).gap is None


def test_more_units_than_a_solver_looks_through_are_told() -> None:
    chain, join = weighing(4.0, 2.0, 4.0, 2.0), [(0, 3)]
    found = place(chain, join, 3, effort=Effort(seconds=1.0, most_choices=11))
    assert found.without == "4 units on 3 partitions are more than a solver looks through"


def test_what_is_not_worth_it_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, join = weighing(4.0, 2.0, 4.0, 2.0), [(0, 3)]
    assert max(place(chain, join, 3, effort=Effort(seconds=1.0, worth=1.5)).placement.memory) == 4.0
    monkeypatch.setattr(placing, "solve_dag", None)
    assert max(place(chain, join, 3, effort=Effort(seconds=1.0, worth=2.0)).placement.memory) == 6.0


@pytest.mark.parametrize(
    ("objective", "stages", "microbatches", "share"),
    [
        *(("speed", 2, 4, 0.005), ("speed", 4, 4, 0.03 / 7), ("speed", 8, 4, 0.03 / 11)),
        *(("speed", 4, 1, 0.005), ("memory", 4, 4, 0.005)),
    ],
)
def test_what_is_near_enough_leaves_the_slowest_stage_within_a_percent(
    objective: str, stages: int, microbatches: int, share: float
) -> None:
    """Half a percent of a step of few microbatches was up to 1.2 % of its slowest stage."""
    assert near(objective, stages, microbatches) == pytest.approx(share)


def test_a_proof_is_looked_for_until_the_slowest_stage_is_within_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[float] = []
    bound = placing._Tight.bound

    def asked(tight: object, bounded: float, score: float, enough: float) -> float:
        wanted.append(enough / score)
        return bound(tight, bounded, score, enough)  # type: ignore[arg-type]

    monkeypatch.setattr(placing._Tight, "bound", asked)
    chain = Chain(names(9), (4.0, 2.0, 4.0, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0))
    place(chain, [(unit, 8) for unit in range(8)], 4, objective="speed", microbatches=4, effort=Effort(seconds=1.0))
    assert wanted == [pytest.approx(0.03 / 7)]


def test_without_time_for_a_proof_the_gap_is_that_to_what_no_placement_can_beat() -> None:
    found = place(weighing(4.0, 2.0, 4.0, 2.0), [(0, 3)], 3)
    assert (max(found.placement.memory), found.without) == (6.0, None)
    assert found.gap == pytest.approx(1 / 3)  # a third of all is 4


def test_without_or_tools_the_cut_is_taken_and_why_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = place(weighing(4.0, 2.0, 4.0, 2.0), [(0, 3)], 3, effort=Effort(seconds=1.0))
    assert found.without == "OR-tools is not installed (pip install ortools)"
    assert found.gap == pytest.approx(1 / 3)


def test_a_weight_of_three_users_leaves_owners_to_look_for() -> None:
    weights = (Weight(0, (0, 1, 2), 10.0, 0.0, 30.0), Weight(1, (0,), 25.0, 0.0, 0.0), Weight(2, (2,), 25.0, 0.0, 0.0))
    found = place(Chain(names(3), (1.0,) * 3, weights=weights), follow(3), 3, effort=Effort(seconds=1.0))
    assert (max(found.placement.memory), found.placement.owners[0]) == (40.0, 1)
    assert found.gap == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "times"),
    [
        (Ranks((1.0, 3.0), (1.0, 1.0), (None, None)), (3.0, 3.0)),
        (Ranks((1.0, 1.0), (1.0, 1.0), (None, None)), (6.0, 6.0)),
        (Ranks((1.0, 3.0), (1.0, 1.0), (None, 8.0)), (4.0, 8 / 3)),
    ],
)
def test_ranks_get_what_they_are_fast_enough_for(ranks: Ranks, times: tuple[float, float]) -> None:
    chain = Chain(names(12), (1.0,) * 12, weights=weighing(*[1.0] * 12).weights)
    found = place(chain, follow(12), 2, objective="speed", microbatches=8, ranks=ranks)
    assert found.placement.times == pytest.approx(times)
    assert found.gap == 0.0


def test_a_slow_link_is_not_cut_where_much_crosses() -> None:
    flows = (Flow(0, (1,), 1.0), Flow(1, (2,), 8.0), Flow(2, (3,), 1.0))  # 2 + 0.8 or 3 + 0.1 seconds
    chain = Chain(names(4), (1.0,) * 4, flows, seconds_per_byte=0.1)
    fast = place(chain, follow(4), 2, objective="speed", microbatches=100)
    slow = place(
        chain, follow(4), 2, objective="speed", microbatches=100, ranks=Ranks((1.0,) * 2, (0.5,) * 2, (None,) * 2)
    )
    assert (fast.placement.cuts, slow.placement.cuts) == ((2,), (1,))

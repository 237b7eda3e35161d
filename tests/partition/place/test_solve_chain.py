"""Cutting chains: literal cases, public workloads, and brute force on random small chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.place.placement import Chain, Chunks, Placement, Ranks, costed
from smp_tf.partition.place.solve_chain import solve_chain
from smp_tf.partition.units.cost import Flow, Stash, Weight
from tests.partition.chains import chains, names, slow_costs, some_by_hand, unequal_ranks
from tests.partition.workloads import workload


def test_time_is_balanced() -> None:
    chain = Chain(names(6), (1.0, 1.0, 1.0, 1.0, 1.0, 4.0))
    solution = solve_chain(chain, 3, objective="speed", microbatches=8)
    assert solution.stage_of[5] == 2
    assert solution.times[2] == 4.0


def test_equal_layers_are_shared_out_equally() -> None:
    assert solve_chain(Chain(names(8), (1.0,) * 8), 4, objective="speed", microbatches=4).stage_of == (
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    )


def test_no_stage_is_empty_even_when_one_unit_is_all_the_work() -> None:
    solution = solve_chain(Chain(names(3), (9.0, 0.0, 0.0)), 3, objective="speed")
    assert solution.cuts == (1, 2)


def test_the_cut_avoids_the_large_tensor() -> None:
    flows = (Flow(0, (1,), 1.0), Flow(1, (2,), 100.0), Flow(2, (3,), 1.0))
    chain = Chain(names(4), (1.0, 1.0, 1.0, 1.0), flows, seconds_per_byte=0.05)
    solution = solve_chain(chain, 2, objective="speed")
    assert solution.cuts in ((1,), (3,))
    # 3 units of compute and one byte; 1 unit and the same byte, received.
    assert sorted(solution.times) == pytest.approx([1.05, 3.05])


def test_a_tensor_is_received_once_by_each_stage_that_reads_it_and_sent_once() -> None:
    chain = Chain(names(4), (0.0,) * 4, (Flow(0, (1, 2, 3), 10.0),), seconds_per_byte=1.0)
    assert solve_chain(chain, 4, objective="speed").times == (10.0, 10.0, 10.0, 10.0)
    assert sum(solve_chain(chain, 2, objective="speed").times) == 20.0


def test_gradients_flow_backward() -> None:
    chain = Chain(names(3), (1.0,) * 3, (Flow(2, (0, 1), 4.0, backward=True),), seconds_per_byte=1.0)
    assert solve_chain(chain, 3, objective="speed").times == (5.0, 5.0, 5.0)


def test_memory_counts_the_stash_of_every_microbatch_in_flight() -> None:
    chain = Chain(names(4), (1.0,) * 4, stashes=tuple(Stash((i,), 10.0) for i in range(4)))
    even = solve_chain(chain, 2, objective="memory", microbatches=8, in_flight=(1, 1))
    assert (even.cuts, even.memory) == ((2,), (20.0, 20.0))
    # 1F1B keeps 3 on the first stage and 1 on the last: one unit there weighs as much as three
    # here.
    skewed = solve_chain(chain, 2, objective="memory", microbatches=8, in_flight=(3, 1))
    assert (skewed.cuts, skewed.memory) == ((1,), (30.0, 30.0))


def test_by_default_1f1b_is_in_flight() -> None:
    chain = Chain(names(3), (1.0,) * 3, stashes=tuple(Stash((i,), 1.0) for i in range(3)))
    assert solve_chain(chain, 3, microbatches=8).memory == (3.0, 2.0, 1.0)
    assert solve_chain(chain, 3, microbatches=2).memory == (2.0, 2.0, 1.0)


def test_a_tensor_kept_by_two_units_of_a_stage_is_kept_once() -> None:
    chain = Chain(names(2), (1.0, 1.0), stashes=(Stash((0, 1), 7.0),))
    assert solve_chain(chain, 1, in_flight=(1,)).memory == (7.0,)
    assert solve_chain(chain, 2, in_flight=(1, 1)).memory == (7.0, 7.0)


def shared(first: float = 0.0, last: float = 0.0) -> Chain:
    """A weight used at both ends: 10 bytes, a gradient of 10, slots of 20."""
    weights = (
        Weight(0, (0, 3), 10.0, 10.0, 20.0),
        Weight(1, (0,), first, 0.0, 0.0),
        Weight(2, (3,), last, 0.0, 0.0),
    )
    return Chain(names(4), (1.0,) * 4, weights=weights)


def test_a_shared_weight_is_owned_where_there_is_room() -> None:
    early = solve_chain(shared(last=20.0), 2, objective="memory")
    assert (early.owners[0], early.memory) == (0, (40.0, 40.0))
    late = solve_chain(shared(first=20.0), 2, objective="memory")
    assert (late.owners[0], late.memory) == (1, (40.0, 40.0))


def test_uses_of_a_shared_weight_stay_together_where_that_is_cheaper() -> None:
    weights = (Weight(0, (1, 2), 100.0, 100.0, 0.0),)
    chain = Chain(names(4), (1.0,) * 4, weights=weights, seconds_per_byte=1.0)
    solution = solve_chain(chain, 2, objective="speed")
    assert solution.stage_of[1] == solution.stage_of[2]
    assert sum(solution.times) == 4.0


def test_the_copy_of_a_shared_weight_is_charged_to_both_ends_and_spread_over_the_microbatches() -> None:
    chain = Chain(names(2), (1.0, 1.0), weights=(Weight(0, (0, 1), 8.0, 8.0, 0.0),), seconds_per_byte=1.0)
    # Value and gradient, 16 bytes per step, over 4 microbatches.
    assert solve_chain(chain, 2, objective="speed", microbatches=4).times == (5.0, 5.0)


def test_manual_stages_are_respected() -> None:
    chain = Chain(names(5), (1.0,) * 5, manual=(None, 0, None, None, 1))
    assert solve_chain(chain, 2, objective="speed").stage_of in (
        (0, 0, 0, 1, 1), (0, 0, 1, 1, 1)
    )  # fmt: skip
    chain = Chain(names(5), (1.0,) * 5, manual=(None, None, None, 0, None))
    assert solve_chain(chain, 2, objective="speed").stage_of == (0, 0, 0, 0, 1)


def test_manual_stages_out_of_order_are_an_error() -> None:
    chain = Chain(names(2), (1.0, 1.0), manual=(1, 0))
    with pytest.raises(PlacementError, match="'u0', on partition 1, comes before 'u1', on partition 0"):
        solve_chain(chain, 2)


def test_a_manual_stage_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(PlacementError, match=r"'u1' was placed on partition 2\. There are 2: use 0 to 1"):
        solve_chain(Chain(names(2), (1.0, 1.0), manual=(None, 2)), 2)


def test_manual_stages_that_leave_none_for_a_partition_are_an_error() -> None:
    with pytest.raises(PlacementError, match="No cut into 3 partitions agrees with the manual"):
        solve_chain(Chain(names(3), (1.0,) * 3, manual=(0, 2, None)), 3)


def test_more_stages_than_units_is_an_error_that_says_how_many_are_possible() -> None:
    with pytest.raises(PlacementError) as caught:
        solve_chain(Chain(("net/a", "net/b"), (1.0, 1.0)), 3)
    assert str(caught.value) == (
        "The model has 2 units that can be put on different partitions (net/a, net/b), and every "
        "partition needs at least one. Received: partitions=3; the largest possible is 2. Use "
        "fewer "
        "partitions, or build the model of more layers."
    )


def test_a_plan_that_does_not_fit_names_the_unit_that_is_too_large() -> None:
    gib = 2.0**30
    weights = (Weight(0, (0,), 3.1 * gib, 0.0, 0.0), Weight(1, (1,), 0.1 * gib, 0.0, 0.0))
    chain = Chain(("net/embedding", "net/dense"), (1.0, 1.0), weights=weights)
    with pytest.raises(PlacementError, match=r"Stage 0: net/embedding alone is 3\.10 GiB, the limit is 2\.00 GiB"):
        solve_chain(chain, 2, ranks=Ranks.alike(2, 2 * gib))


def test_the_memory_limit_is_kept_at_the_price_of_time() -> None:
    weights = tuple(Weight(i, (i,), float(size), 0.0, 0.0) for i, size in enumerate((9, 1, 1, 1)))
    chain = Chain(names(4), (1.0, 1.0, 1.0, 1.0), weights=weights)
    assert solve_chain(chain, 2, objective="speed", microbatches=8).cuts == (2,)
    assert solve_chain(chain, 2, objective="speed", microbatches=8, ranks=Ranks.alike(2, 9.0)).cuts == (1,)


def test_within_the_tolerance_the_second_objective_decides() -> None:
    weights = tuple(Weight(i, (i,), size, 0.0, 0.0) for i, size in enumerate((50.0, 1.0, 49.0)))
    # Cut (1,) has 50 and 50 bytes, in times 0 and 4; cut (2,) has 51 and 49 bytes, in times 1 and
    # 3.
    chain = Chain(names(3), (0.0, 1.0, 3.0), weights=weights)
    assert solve_chain(chain, 2, tolerance=0.0, microbatches=4, in_flight=(1, 1)).cuts == (1,)
    assert solve_chain(chain, 2, tolerance=0.03, microbatches=4, in_flight=(1, 1)).cuts == (2,)


# --- public workloads -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "best"), [("bert24_inference", 17.790), ("gnmt_inference", 33.033), ("gnmt_training", 107.004)]
)
def test_public_workloads_are_cut_as_well_as_one_order_allows(name: str, best: float) -> None:
    """As is known of gnmt_inference, whose proved optimum of any order is 32.911."""
    given = workload(name)
    solution = solve_chain(given.chain, given.stages, objective="speed", microbatches=10**9, tolerance=0.0)
    assert max(solution.times) == pytest.approx(best, abs=6e-4)
    assert solution.times == pytest.approx(given.loads(solution.stage_of))


# --- brute force ----------------------------------------------------------------------------------


def stages_of_cuts(cuts: Sequence[int], count: int) -> list[int]:
    """The stage of every unit."""
    return [sum(cut <= unit for cut in cuts) for unit in range(count)]


def all_costs(
    chain: Chain, stages: int, in_flight: Sequence[int], microbatches: int, ranks: Ranks | None = None
) -> list[tuple[float, float]]:
    """Step time and fullest stage of every cut and every choice of owners that limits and stages by hand allow.

    Weights with the same users have the same owner: that is the solver's rule, too.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for weight in chain.weights:
        groups.setdefault(tuple(weight.users), []).append(weight.variable)
    limits = [math.inf if limit is None else limit for limit in (ranks or Ranks.alike(stages)).memory]
    found = []
    for cuts in combinations(range(1, len(chain.names)), stages - 1):
        stage_of = stages_of_cuts(cuts, len(chain.names))
        if any(given not in (None, stage) for given, stage in zip(chain.manual, stage_of, strict=False)):
            continue
        for size in range(len(groups) + 1):
            for chosen in combinations(groups.values(), size):
                late = frozenset(v for group in chosen for v in group)
                times, memory = slow_costs(chain, stage_of, late, in_flight, microbatches, ranks)
                if all(held <= limit for held, limit in zip(memory, limits, strict=True)):
                    found.append((sum(times) + (microbatches - 1) * max(times), max(memory)))
    return found


@pytest.mark.timeout(60)
def test_sizes_that_cancel_out_to_less_than_nothing_are_cut() -> None:
    """Bug: cuts that were to be more even than one whose times were just under zero were sought for ever."""
    flows = (Flow(0, (2,), 1 / 3), Flow(1, (0, 2), 1.1))
    chain = Chain(names(3), (0.0,) * 3, flows, (), (), seconds_per_byte=0.5)
    for stages, microbatches in ((1, 1), (1, 2), (1, 5), (2, 2), (3, 5)):
        for objective in ("speed", "memory"):
            placement = solve_chain(chain, stages, objective=objective, microbatches=microbatches, tolerance=0.0)
            assert sorted(set(placement.stage_of)) == list(range(stages))


@settings(max_examples=500, deadline=None)
@given(
    chain=chains(),
    stages=st.integers(1, 4),
    microbatches=st.sampled_from([1, 2, 5]),
    alike=st.booleans(),
    data=st.data(),
)
def test_no_cut_is_better(chain: Chain, stages: int, microbatches: int, alike: bool, data: st.DataObject) -> None:
    """Without the tolerance by which a plan goes, of half a percent."""
    stages = min(stages, len(chain.names))
    in_flight = [min(stages - r, microbatches) for r in range(stages)]
    ranks = None
    if not alike:
        cuts = set(data.draw(st.permutations(range(1, len(chain.names))))[: stages - 1])
        some = stages_of_cuts(sorted(cuts), len(chain.names))
        ranks = data.draw(unequal_ranks(slow_costs(chain, some, frozenset(), in_flight, microbatches)[1]))
        if data.draw(st.booleans()):
            chain = replace(chain, manual=data.draw(some_by_hand(some)))
    every = all_costs(chain, stages, in_flight, microbatches, ranks)

    def solved(objective: str) -> Placement:
        return solve_chain(chain, stages, objective=objective, microbatches=microbatches, ranks=ranks, tolerance=0.0)

    if not every:
        for objective in ("speed", "memory"):
            with pytest.raises(MemoryLimitError):
                solved(objective)
        return
    fast, small = solved("speed"), solved("memory")
    step = sum(fast.times) + (microbatches - 1) * max(fast.times)
    assert step == pytest.approx(min(time for time, _ in every))
    least = min(memory for _, memory in every)
    assert max(small.memory) == pytest.approx(least)
    step = sum(small.times) + (microbatches - 1) * max(small.times)
    assert step == pytest.approx(min(time for time, memory in every if memory <= least + 1e-9))
    limits = [math.inf if limit is None else limit for limit in (ranks or Ranks.alike(stages)).memory]
    for one in (fast, small):
        assert all(held <= limit for held, limit in zip(one.memory, limits, strict=True))


@settings(max_examples=100, deadline=None)
@given(chain=chains(), stages=st.integers(1, 4))
def test_costs_are_what_the_records_mean(chain: Chain, stages: int) -> None:
    stages = min(stages, len(chain.names))
    in_flight = list(range(stages, 0, -1))
    solution = solve_chain(chain, stages, in_flight=in_flight, microbatches=4)
    late = frozenset(
        w.variable
        for w in chain.weights
        if solution.owners[w.variable] == solution.stage_of[w.users[-1]]
        and solution.stage_of[w.users[0]] != solution.stage_of[w.users[-1]]
    )
    times, memory = slow_costs(chain, solution.stage_of, late, in_flight, 4)
    assert solution.times == pytest.approx(times)
    assert solution.memory == pytest.approx(memory)


@settings(max_examples=100, deadline=None)
@given(chain=chains(), stages=st.integers(1, 4), data=st.data())
def test_costs_of_any_placement_are_what_the_records_mean(chain: Chain, stages: int, data: st.DataObject) -> None:
    stage_of = [data.draw(st.integers(0, stages - 1)) for _ in chain.names]
    in_flight = list(range(stages, 0, -1))
    late = frozenset(w.variable for w in chain.weights if data.draw(st.booleans()))
    owners = {w.variable: stage_of[w.users[-1 if w.variable in late else 0]] for w in chain.weights}
    times, memory = slow_costs(chain, stage_of, late, in_flight, 4)
    found = costed(chain, stage_of, owners, 4, Chunks.one_each(in_flight))
    assert found.times == pytest.approx(times)
    assert found.memory == pytest.approx(memory)


@settings(max_examples=60, deadline=None)
@given(chain=chains(), stages=st.integers(1, 5))
def test_stages_are_runs_of_the_order_and_none_is_empty(chain: Chain, stages: int) -> None:
    stages = min(stages, len(chain.names))
    stage_of = solve_chain(chain, stages).stage_of
    assert stage_of[0] == 0
    assert stage_of[-1] == stages - 1
    assert all(b - a in (0, 1) for a, b in pairwise(stage_of))


def test_three_thousand_units_are_cut() -> None:
    count = 3000
    times = tuple(1.0 + (i * 7919 % 13) for i in range(count))
    flows = tuple(Flow(i, (i + 1,), 1.0) for i in range(count - 1))
    chain = Chain(names(count), times, flows, seconds_per_byte=0.01)
    solution = solve_chain(chain, 4, objective="speed", microbatches=8)
    assert max(solution.times) == pytest.approx(sum(times) / 4, rel=0.005)

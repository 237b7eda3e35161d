"""What messages take of processors is part of the time of stages, where ranks of one host have measured it."""

from __future__ import annotations

import dataclasses

import pytest

from smp_tf.partition.place.placement import Chain, Chunks, Ranks, costed
from smp_tf.partition.place.solve_chain import solve_chain
from smp_tf.partition.place.solve_dag import solve_dag
from smp_tf.partition.units.cost import Flow, Machine, MessageCost, Weight
from smp_tf.pipeline.planner.proposal import propose
from smp_tf.pipeline.planner.units import costs_of
from smp_tf.pipeline.schedules.schedule import placement_of
from tests.partition.chains import names, problem
from tests.pipeline.planner.test_timeline import COMPUTED, GRAPH, REQUEST, simulated

#: A second for a message, and one for 64 bytes. So each message of 128 bytes takes three seconds at each end, and one
#: of a number 1.0625.
MEASURED = dataclasses.replace(REQUEST.times, message=(1.0, 1 / 64))
ON_TWO_HOSTS = Ranks((1.0, 1.0), (1.0, 1.0), (None, None), hosts=(0, 1))


def test_the_stages_of_a_host_are_busy_with_messages() -> None:
    """Two layers a stage take 2 seconds forward, 4 backward. Each pass has a message, and forward the loss, too."""
    assert placement_of("simple", 2) == (0, 1)
    assert COMPUTED == 22.0
    forward, backward = 2.0 + 3.0 + 1.0625, 4.0 + 3.0
    # Nothing is on its way meanwhile.
    assert simulated(times=MEASURED).computed == 3 * forward + 3 * backward
    assert simulated(times=MEASURED, ranks=ON_TWO_HOSTS).computed == COMPUTED


def test_the_plan_says_what_messages_take() -> None:
    words = (
        "a message takes 1.00 s of the processors of both its ranks, and 16384.00 s for each MiB, as measured: that is "
        "part of a stage's time"
    )
    assert words in propose(GRAPH, REQUEST.changed(times=MEASURED), {}).reasons
    for other in (REQUEST, REQUEST.changed(times=MEASURED, ranks=ON_TWO_HOSTS)):
        assert not any("a message takes" in reason for reason in propose(GRAPH, other, {}).reasons)


def test_costs_are_those_of_the_host_where_all_stages_are_on_one() -> None:
    machine = Machine(1.0, memory=128.0, link=64.0, op_seconds=0.5)
    _, measured = costs_of(GRAPH, REQUEST.changed(times=MEASURED))
    assert measured.machine == dataclasses.replace(machine, message=MessageCost(1.0, 1 / 64))
    chain = Chain.of(names(4), measured)
    assert (chain.seconds_per_byte, chain.bytes_per_message) == (1 / 64, 64.0)
    _, apart = costs_of(GRAPH, REQUEST.changed(times=MEASURED, ranks=ON_TWO_HOSTS))
    assert apart.machine == machine
    assert Chain.of(names(4), apart).bytes_per_message == 0.0


#: Two tensors of a byte pass the middle, and one of four bytes passes after the third unit. A tenth of a second a byte.
FLOWS = (Flow(0, (1,), 40.0), Flow(1, (2,), 1.0), Flow(1, (3,), 1.0), Flow(2, (3,), 3.0))
CHAIN = Chain(names(4), (1.0, 1.0, 0.9, 1.1), FLOWS, seconds_per_byte=0.1)
COSTLY = dataclasses.replace(CHAIN, bytes_per_message=10.0)


def test_one_large_message_may_take_less_than_two_small_ones() -> None:
    options = {"objective": "speed", "microbatches": 1, "tolerance": 0.0}
    # Without a price for messages: 2 bytes at the middle, 4 after it, where the second tensor passes, too.
    assert solve_chain(CHAIN, 2, **options).times == pytest.approx((2.0 + 0.2, 2.0 + 0.2))
    one = dataclasses.replace(COSTLY, flows=(*FLOWS[:2], Flow(1, (2,), 1.0), FLOWS[3]))
    found = solve_chain(one, 2, **options)
    assert found.cuts == (3,)
    assert found.times == pytest.approx((2.9 + 1.3, 1.1 + 1.3))
    solved = solve_dag(problem(one, [(0, 1), (1, 2), (2, 3)], 2, objective="speed", microbatches=1), 5.0)
    assert solved is not None
    assert solved.times == pytest.approx(found.times)


def test_a_weight_crosses_in_two_messages() -> None:
    shared = dataclasses.replace(CHAIN, flows=(), weights=(Weight(0, (0, 3), 5.0, 5.0, 0.0),), bytes_per_message=10.0)
    # Its value and its gradient, five bytes each and ten for each message, over two microbatches.
    assert shared.bytes_across(shared.weights[0]) == 30.0
    made = costed(shared, (0, 0, 1, 1), {}, 2, Chunks.one_each((1, 1)))
    assert made.times == pytest.approx((2.0 + 1.5, 2.0 + 1.5))
    assert solve_chain(shared, 2, microbatches=2, objective="speed").times == pytest.approx(made.times)
    frozen = dataclasses.replace(shared.weights[0], gradient=0.0)
    assert shared.bytes_across(frozen) == 15.0

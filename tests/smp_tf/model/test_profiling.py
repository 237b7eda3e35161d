"""Which rank measures which unit."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest

from smp_tf.job import runtime
from smp_tf.model import measurement
from smp_tf.model.measurement import (
    Taken,
    first_of_a_kind,
    measure_in_rounds,
    medians_of_equals,
    most_of_equals,
    put_together,
    shares,
    shares_alone,
)
from smp_tf.model.profiling import hardware_alike, most_at_a_time, pairs_on_hosts
from smp_tf.partition.units.cost import Machine, estimate
from smp_tf.partition.units.units import build_units
from smp_tf.pipeline.planner.unit_peaks import UnitPeaks
from smp_tf.planning.kept_measurements import MeasuredHardware
from tests.partition.op_graph_builder import chain_of_dense


def test_every_rank_measures_as_much_and_the_dearest_first() -> None:
    graph = chain_of_dense(4)
    costs = estimate(graph, build_units(graph), machine=Machine(flops=1.0, memory=1e30, link=1.0, op_seconds=0.0))
    # Behind the first layer no gradient to the input is made, and the loss is next to nothing.
    assert [round(u.seconds.both) for u in costs.units] == [1088, 1600, 1600, 1600, 32]
    assert shares(costs, range(5), 1) == [[1, 2, 3, 0, 4]]
    assert shares(costs, range(5), 2) == [[1, 0, 4], [2, 3]]
    assert shares(costs, range(5), 8) == [[1], [2], [3], [0], [4], [], [], []]
    assert shares(costs, [0, 2, 4], 2) == [[2], [0, 4]]


def test_seven_of_the_units_that_do_the_same_are_measured() -> None:
    assert first_of_a_kind(["embedding", *["attention", "dense"] * 9, "loss"]) == [*range(15), 19]


def test_a_training_takes_what_was_measured_like_it_first_and_what_a_command_measured_too() -> None:
    training = MeasuredHardware("a processor", 8, 2, 0, True, 4, "2.21.0")
    alone = dataclasses.replace(training, processes=1)
    assert hardware_alike(training, 4) == [
        training,
        dataclasses.replace(alone, threads=2),
        # `smp-tf profile` leaves the threads to TensorFlow.
        dataclasses.replace(alone, threads=0),
    ]
    command = dataclasses.replace(alone, threads=0)
    assert hardware_alike(command, 1) == [command, dataclasses.replace(alone, threads=8)]
    # A plan for four processes, made by one that has all cores.
    assert hardware_alike(command, 4) == [
        dataclasses.replace(command, processes=4),
        training,
        dataclasses.replace(alone, threads=2),
        command,
    ]


def test_what_a_task_takes_alone_is_weighed_by_time_and_kept_within_bounds() -> None:
    beside, small = (2.0, 6.0), (0.5, 2.0)
    assert shares_alone([(beside, (1.5, 3.0)), (small, (0.5, 2.0))], together=2) == (2.0 / 2.5, 5.0 / 8.0)
    # Disturbed while it was alone; and faster than two can be.
    assert shares_alone([(beside, (2.5, 2.0))], together=2) == (1.0, 0.5)
    assert shares_alone([(beside, (2.5, 2.0))], together=4) == (1.0, 2.0 / 6.0)
    # Of layers that have no backward pass, or of none.
    assert shares_alone([((1.0, 0.0), (0.5, 0.0))], together=2) == (0.5, 1.0)
    assert shares_alone([], together=2) == (1.0, 1.0)


def rounds_of(
    rank: int, units: int, rounds: int, patch: pytest.MonkeyPatch, local_size: int = 2, processors: int = 8
) -> str:
    """What one of the ranks of a host does: m makes a unit ready, M measures one, | waits for the others."""
    done: list[str] = []

    def measured(ready: Any, crowd: float = 1.0) -> Taken:
        done.append(f"M{ready}")
        return Taken((1.0, 1.0), (1, 1))

    def make(turn: int) -> Any:
        done.append(f"m{turn}")
        return turn

    place = SimpleNamespace(rank=rank, hosts=("a",) * max(2, local_size), local_rank=rank, local_size=local_size)
    usable = list(range(processors))
    patch.setattr(runtime, "current", lambda: SimpleNamespace(topology=place))
    patch.setattr(measurement, "barrier", lambda name: done.append("|"))
    patch.setattr(measurement, "allgather_json", lambda said, name: [said] * len(place.hosts))
    patch.setattr(measurement.os, "sched_getaffinity", lambda process: usable)
    patch.setattr(measurement, "as_forward_and_backward", measured)
    measure_in_rounds("a test", [f"unit {n}" for n in range(units)], make, rounds)
    return " ".join(done)


def test_nobody_measures_alone_while_another_makes_or_measures_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 once went on to make its next unit; and rank 1, without a third one, once left it alone with its own."""
    assert rounds_of(0, 3, 3, monkeypatch) == "m0 | M0 | M0 | | m1 | M1 | M1 | | m2 | M2 | M2 | |"
    assert rounds_of(1, 2, 3, monkeypatch) == "m0 | M0 | | M0 | m1 | M1 | | M1 | | M1 | | M1 |"
    # A rank of a host with fewer: what it measures beside nobody says nothing of sharing.
    assert rounds_of(0, 1, 1, monkeypatch, local_size=1) == "m0 | M0 | | |"


def test_more_ranks_than_processors_measure_in_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two cores took turns: equal layers had 0 and 32 ms, and a plan by these times made slow steps."""
    crowded = functools.partial(rounds_of, patch=monkeypatch, local_size=4, processors=2)
    # Two shifts, and three ranks that measure alone.
    assert crowded(0, 1, 1) == "m0 | M0 | | M0 | | |"
    assert crowded(2, 1, 1) == "m0 | | M0 | | | M0 |"
    assert crowded(3, 1, 1) == "m0 | | M0 | | | |"


def test_units_that_do_the_same_have_the_median_of_their_times() -> None:
    times = {"a": (1.0, 2.0), "b": (0.0, 9.0), "c": (9.0, 3.0), "loss": (0.5, 0.5)}
    work = {"a": "Dense", "b": "Dense", "c": "Dense", "d": "Dense", "loss": "Sum"}
    # Also those that were not measured, since seven others do the same.
    assert medians_of_equals(times, work) == {**dict.fromkeys("abcd", (1.0, 3.0)), "loss": (0.5, 0.5)}
    peaks = UnitPeaks({"a": (10, 20), "b": (30, 10), "loss": (1, 2)}, 256)
    assert most_of_equals(peaks, work) == UnitPeaks({**dict.fromkeys("abcd", (30, 20)), "loss": (1, 2)}, 256)


def test_of_a_unit_that_several_ranks_had_the_most_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement.allocator, "counted_from", lambda: 256)
    one, other = {"net/a": [1.0, 4.0], "net/b": [1.0, 1.0]}, {"net/a": [3.0, 2.0]}
    found = put_together([[one, [], {"net/a": [10, 40], "net/b": [1, 2]}], [other, [], {"net/a": [30, 20]}]], 1)
    assert found.times == {"net/a": (2.0, 3.0), "net/b": (1.0, 1.0)}
    assert found.peaks == UnitPeaks({"net/a": (30, 40), "net/b": (1, 2)}, 256)
    # Where the allocator of a rank does not count, the bytes of some units are unknown, and nothing is told of any.
    assert put_together([[one, [], {}], [other, [], {"net/a": [30, 20]}]], 1).peaks == UnitPeaks()


def test_memory_is_taken_for_the_largest_unit() -> None:
    graph = chain_of_dense(2, width=1024, batch=128)
    costs = estimate(graph, build_units(graph))
    # The second layer: a kernel of 4 MiB, which two ops read; its gradient; and 11 times half a MiB read or written.
    assert most_at_a_time(costs) == (4 + 2 * 4 + 4) * 2**20 + 11 * 2**19
    assert most_at_a_time(dataclasses.replace(costs, units=())) == 0


def test_ranks_of_a_host_measure_messages_in_pairs() -> None:
    assert pairs_on_hosts([0, 2, 4], ["a", "a", "a", "b", "a", "b"]) == {0: 2, 2: 0}
    assert pairs_on_hosts([1, 3], ["a", "a", "b", "b"]) == {}

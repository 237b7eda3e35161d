"""Ranks that share a host's processors: the tables are worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.pipeline.errors import ProgramError, ScheduleError
from smp_tf.pipeline.programs.chunk_times import ChunkTimes, TaskTimes
from smp_tf.pipeline.programs.kinds import duration
from smp_tf.pipeline.programs.shared_host import Sharing, simulate_on_hosts
from smp_tf.pipeline.programs.simulate import latency_of, simulate
from smp_tf.pipeline.programs.transfers import add_transfers
from smp_tf.pipeline.schedules.schedule import build
from smp_tf.pipeline.task import Kind, Program, Task
from tests.pipeline.programs.test_simulate import chain
from tests.pipeline.stepped_hosts import SteppedHosts

#: Backward of two seconds beside another, of one alone.
TIMES = ChunkTimes(1.0, 1.0, 1.0)


def spans(timeline: object, rank: int) -> list[tuple[str, float, float]]:
    return [(str(s.task), s.start, s.end) for s in timeline.spans[rank]]  # type: ignore[attr-defined]


def test_a_task_is_faster_while_the_other_rank_of_its_host_waits() -> None:
    program = build("interleaved", stages=2, microbatches=2)
    found = simulate_on_hosts(program, TIMES, None, Sharing((0, 0), 1.0, 0.5))
    # A forward task needs one of the two processors, a backward one both: side by side they go at two thirds.
    #
    #          0      1      2      3         4.5       5.5       6.5
    # rank 0   |--F0--|--F1--|......|----B0---|.........|----B1---|
    # rank 1   |......|--F0--|--B0--|----F1---|----B1---|.........|
    assert spans(found, 0) == [("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0), ("0B0", 3.0, 4.5), ("0B1", 5.5, 6.5)]
    assert spans(found, 1) == [("1F0", 1.0, 2.0), ("1B0", 2.0, 3.0), ("1F1", 3.0, 4.5), ("1B1", 4.5, 5.5)]
    # All the time beside one another, it would be as long as this.
    assert simulate(program, TIMES).step_time == 9.0


def test_ranks_of_different_hosts_do_not_slow_each_other_down() -> None:
    program = build("interleaved", stages=2, microbatches=2)
    # Each is the only rank of its host, so the time beside all others is its time alone.
    found = simulate_on_hosts(program, TIMES, None, Sharing((0, 1), 1.0, 1.0))
    assert found == simulate(program, TIMES)
    # Two hosts with two ranks each: all forward tasks at half of their time, but for the moment at which two meet.
    program = build("simple", stages=4, microbatches=1)
    found = simulate_on_hosts(program, TIMES, None, Sharing((0, 0, 1, 1), 0.5, 0.5))
    assert found.step_time == simulate(program, TIMES).step_time / 2


def test_a_further_sweep_gains_nothing() -> None:
    sharing = Sharing((0, 0), 0.5, 0.6)
    tasks = [Task(Kind.F, 0, 0), Task(Kind.B, 0, 0), Task(Kind.I, 0, 0), Task(Kind.W, 0, 0)]
    assert [sharing.of(task) for task in tasks] == [0.5, 0.6, 0.6, 0.6]
    assert sharing.of(Task(Kind.T, 0, 0, sweep=2)) == 1.0


def test_messages_take_their_time_while_ranks_compute() -> None:
    program = build("interleaved", stages=2, microbatches=1)
    found = simulate_on_hosts(program, TIMES, None, Sharing((0, 0), 1.0, 0.5), comm=0.25)
    # F0, message, F1, B1, message, B0, all alone.
    assert found.step_time == 1.0 + 0.25 + 1.0 + 1.0 + 0.25 + 1.0


@settings(deadline=None, max_examples=60)
@given(
    schedule=st.sampled_from(["simple", "interleaved"]),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    seconds=st.lists(st.tuples(*[st.floats(0.0, 3.0)] * 3), min_size=4, max_size=4),
    comm=st.floats(0.0, 2.0),
    with_messages=st.booleans(),
)
def test_without_anything_to_gain_it_is_the_plain_simulation(
    schedule: str,
    stages: int,
    microbatches: int,
    seconds: list[tuple[float, float, float]],
    comm: float,
    with_messages: bool,
) -> None:
    program = build(schedule, stages=stages, microbatches=microbatches)
    times = [ChunkTimes(*each) for each in seconds[:stages]]
    edges = chain(stages) if with_messages else None
    if edges is not None:
        program = add_transfers(program, edges)
    plain = simulate(program, times, edges, comm=comm)
    found = simulate_on_hosts(program, times, edges, Sharing((0,) * stages, 1.0, 1.0), comm=comm)
    for ours, theirs in zip(found.spans, plain.spans, strict=True):
        assert [(s.task, s.start, s.end) for s in ours] == [
            (s.task, pytest.approx(s.start, abs=1e-9), pytest.approx(s.end, abs=1e-9)) for s in theirs
        ]


@settings(deadline=None, max_examples=60)
@given(
    schedule=st.sampled_from(["simple", "interleaved", "zb_h1"]),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    forward=st.floats(0.25, 1.0),
    backward=st.floats(0.25, 1.0),
)
def test_it_lies_between_always_beside_others_and_always_alone(
    schedule: str, stages: int, microbatches: int, forward: float, backward: float
) -> None:
    forward, backward = max(forward, 1 / stages), max(backward, 1 / stages)
    program = build(schedule, stages=stages, microbatches=microbatches)
    found = simulate_on_hosts(program, TIMES, None, Sharing((0,) * stages, forward, backward)).step_time
    alone = simulate(program, ChunkTimes(forward, backward, backward)).step_time
    # A forward task may be slower beside a backward one than beside another forward one.
    most = stages * microbatches * 3.0
    assert alone - 1e-9 <= found <= max(most, simulate(program, TIMES).step_time) + 1e-9


@settings(deadline=None, max_examples=150)
@given(
    schedule=st.sampled_from(["simple", "interleaved", "zb_h1", "zb_v", "interleaved_1f1b"]),
    hosts=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    microbatches=st.integers(1, 5),
    shares=st.tuples(st.floats(0.2, 1.0), st.floats(0.2, 1.0)),
    seconds=st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 1.7, 3.0])] * 3), min_size=10, max_size=10),
    comm=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    with_messages=st.booleans(),
)
def test_it_is_what_looking_at_all_ranks_at_every_moment_gives(
    schedule: str,
    hosts: list[int],
    microbatches: int,
    shares: tuple[float, float],
    seconds: list[tuple[float, float, float]],
    comm: float,
    with_messages: bool,
) -> None:
    program = build(schedule, stages=len(hosts), microbatches=microbatches)
    edges = chain(program.chunks) if with_messages else None
    if edges is not None:
        program = add_transfers(program, edges)
    times = [ChunkTimes(*each) for each in seconds[: program.chunks]]
    sharing = Sharing(tuple(hosts), *shares)
    found = simulate_on_hosts(program, times, edges, sharing, comm=comm)
    stepped = SteppedHosts(program, edges, duration(TaskTimes(times)), latency_of(comm, edges), sharing)
    stepped.run()
    for ours, theirs in zip(found.spans, stepped.spans(), strict=True):
        assert [(s.task, s.start, s.end) for s in ours] == [
            (s.task, pytest.approx(s.start, abs=1e-9), pytest.approx(s.end, abs=1e-9)) for s in theirs
        ]


def test_a_program_that_never_ends_is_an_error() -> None:
    stuck = Program(((Task(Kind.B, 0, 0), Task(Kind.F, 0, 0)),), microbatches=1, chunks=1, sweeps=2)
    with pytest.raises(ProgramError, match="rank 0 waits forever before 0B0"):
        simulate_on_hosts(stuck, TIMES, None, Sharing((0,), 1.0, 1.0))
    # Rank 0 ends, and what rank 1 sends it is received by nobody.
    ranks = add_transfers(build("simple", stages=2, microbatches=1), chain(2)).ranks
    lost = Program((tuple(t for t in ranks[0] if t.kind in (Kind.F, Kind.SEND)), ranks[1]), 1, 2, 2)
    with pytest.raises(ProgramError, match=r"rank 1 waits forever before 1S2\.0"):
        simulate_on_hosts(lost, TIMES, chain(2), Sharing((0, 0), 1.0, 1.0))
    with pytest.raises(ScheduleError, match="Times are given for each of the 2 chunks"):
        simulate_on_hosts(build("simple", stages=2, microbatches=1), [TIMES], None, Sharing((0, 0), 1.0, 1.0))

"""The simulator against published formulae and golden numbers, and the bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.pipeline.errors import ProgramError, ScheduleError
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.simulate import lower_bound, simulate
from smp_tf.pipeline.programs.text import parse, parse_program
from smp_tf.pipeline.programs.transfers import add_transfers
from smp_tf.pipeline.schedules.schedule import SCHEDULES, build
from smp_tf.pipeline.task import Edge, Kind, Task


def chain(stages: int) -> list[Edge]:
    up = [Edge(chunk, chunk, 0, chunk + 1, 0) for chunk in range(stages - 1)]
    down = [Edge(stages + chunk, chunk + 1, 1, chunk, 1) for chunk in range(stages - 1)]
    return up + down


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "step", "bubble", "peak"),
    [
        ("simple", 4, 8, 33, 0.2727, [8, 8, 8, 8]),
        ("interleaved", 4, 8, 33, 0.2727, [4, 3, 2, 1]),
        ("simple", 8, 32, 117, 0.1795, [32] * 8),
        ("interleaved", 8, 32, 117, 0.1795, [8, 7, 6, 5, 4, 3, 2, 1]),
        *((kind, 4, 4, 21, 0.4286, None) for kind in ("simple", "interleaved")),
        *((kind, 4, 16, 57, 0.1579, None) for kind in ("simple", "interleaved")),
        *((kind, 4, 32, 105, 0.0857, None) for kind in ("simple", "interleaved")),
        *((kind, 4, 64, 201, 0.0448, None) for kind in ("simple", "interleaved")),
    ],
)
def test_golden_numbers(
    kind: str, stages: int, microbatches: int, step: float, bubble: float, peak: list[int] | None
) -> None:
    timeline = simulate(build(kind, stages, microbatches))
    assert timeline.step_time == step
    assert round(timeline.bubble_ratio, 4) == bubble
    assert timeline.busy == (3.0 * microbatches,) * stages
    if peak is not None:
        assert list(timeline.peak_activations()) == peak


def shares(times: tuple[float, float, float], chunks: int) -> ChunkTimes:
    """The times of one of the chunks that share a rank."""
    return ChunkTimes(*(time / chunks for time in times))


@pytest.mark.parametrize(
    ("kind", "chunks", "stages", "microbatches", "step", "bubble", "peak"),
    [
        ("interleaved_1f1b", 2, 4, 8, 28.5, 0.1579, [5.5, 4.5, 3.5, 2.5]),
        ("interleaved_1f1b", 4, 4, 8, 26.25, 0.0857, [4.75, 4.25, 3.75, 3.25]),
        ("zb_h1", 1, 4, 8, 27, 0.1111, [4, 4, 4, 4]),
        ("zb_v", 2, 4, 8, 25.5, 0.0588, [4, 4, 4, 4]),
        ("v_half", 2, 4, 8, 26.5, 0.0943, [3, 3, 3, 3]),
        ("v_min", 2, 4, 8, 29.5, 0.1864, [2, 2, 2, 2]),
        ("interleaved_1f1b", 2, 8, 32, 106.5, 0.0986, [11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5]),
        ("interleaved_1f1b", 4, 8, 32, 101.25, 0.0519, [9.75, 9.25, 8.75, 8.25, 7.75, 7.25, 6.75, 6.25]),
        ("zb_h1", 1, 8, 32, 103, 0.0680, [8] * 8),
        ("zb_v", 2, 8, 32, 99.5, 0.0352, [8] * 8),
        ("v_half", 2, 8, 32, 104.5, 0.0813, [5] * 8),
        ("v_min", 2, 8, 32, 109.5, 0.1233, [3.5, 4, 4, 3, 4, 4, 3, 4]),
    ],
)
def test_golden_numbers_of_chunks_and_two_pieces(
    kind: str, chunks: int, stages: int, microbatches: int, step: float, bubble: float, peak: list[float]
) -> None:
    timeline = simulate(build(kind, stages, microbatches, chunks), shares((1, 1, 1), chunks))
    assert timeline.step_time == step
    assert round(timeline.bubble_ratio, 4) == bubble
    assert list(timeline.peak_activations()) == peak


def test_zb_h1_holds_the_stashes_of_1f1b_until_the_first_piece_of_backward() -> None:
    timeline = simulate(build("zb_h1", 4, 8))
    assert timeline.peak_activations(Kind.I) == (4, 3, 2, 1)
    assert timeline.peak_activations(Kind.W) == (4, 4, 4, 4)


IN_ONE_PIECE = ("simple", "interleaved")
TICKS = st.integers(1, 40).map(float)


@settings(deadline=None)
@given(st.sampled_from(IN_ONE_PIECE), st.integers(1, 16), st.integers(1, 40), TICKS, TICKS, TICKS)
def test_idle_of_equal_stages(kind: str, stages: int, microbatches: int, f: float, i: float, w: float) -> None:
    timeline = simulate(build(kind, stages, microbatches), ChunkTimes(f, i, w))
    assert timeline.idle == ((stages - 1) * (f + i + w),) * stages
    assert timeline.bubble_ratio == pytest.approx((stages - 1) / (microbatches + stages - 1))


@settings(deadline=None)
@given(st.integers(2, 4), st.integers(1, 8), st.integers(1, 5), TICKS, TICKS, TICKS)
def test_idle_of_interleaved_1f1b(chunks: int, stages: int, groups: int, f: float, i: float, w: float) -> None:
    program = build("interleaved_1f1b", stages, groups * stages, chunks)
    idle = simulate(program, ChunkTimes(f, i, w)).idle
    assert idle == ((stages - 1) * (f + i + w),) * stages  # of times per chunk; by a rank's share, a chunks-th of it


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 20), TICKS, TICKS, TICKS)
def test_idle_of_zb_h1(stages: int, more: int, f: float, i: float, w: float) -> None:
    """By the paper (stages - 1) (f + i - w), for a W no longer than F and I; more is not filled."""
    idle = simulate(build("zb_h1", stages, 2 * stages + more), ChunkTimes(f, i, w)).idle
    assert idle == ((stages - 1) * (f + i - min(f, i, w)),) * stages


@pytest.mark.parametrize("stages", range(1, 17))
def test_idle_in_a_v(stages: int) -> None:
    """With tasks of equal length, in units of one chunk's task."""
    for microbatches in (2 * stages, 3 * stages + 1):
        idle = {kind: simulate(build(kind, stages, microbatches)).idle[0] for kind in ("zb_v", "v_half", "v_min")}
        assert idle["zb_v"] == stages - 1
        if stages > 2:
            # Of the 6 (stages - 1) of 1F1B about a half, and two thirds.
            assert idle["v_half"] == (3 * stages - 7 if stages % 2 == 0 else 3 * stages - 4)
            assert idle["v_min"] == (4 * stages - 3 if stages % 3 == 0 and stages > 3 else 4 * stages - 5)


@settings(deadline=None)
@given(
    st.sampled_from([("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zb_v", 2)]),
    st.integers(1, 8),
    st.integers(1, 30),
    st.tuples(TICKS, TICKS, TICKS),
)
def test_not_slower_than_1f1b_where_stages_are_equal(
    variant: tuple[str, int], stages: int, microbatches: int, times: tuple[float, float, float]
) -> None:
    """For any number of microbatches, and whatever F, I and W take; v_half and v_min promise it for equal times."""
    kind, chunks = variant
    step = simulate(build(kind, stages, microbatches, chunks), ChunkTimes(*times)).step_time
    assert step <= chunks * simulate(build("interleaved", stages, microbatches), ChunkTimes(*times)).step_time


@pytest.mark.parametrize("kind", ["v_half", "v_min"])
def test_not_slower_than_1f1b_where_tasks_are_equal(kind: str) -> None:
    for stages in range(1, 10):
        for microbatches in (1, 2, 3, stages, 2 * stages + 1):
            step = simulate(build(kind, stages, microbatches)).step_time
            assert step <= 6 * (microbatches + stages - 1)


def test_unequal_stages() -> None:
    times = [ChunkTimes(10, 5, 5), ChunkTimes(1, 0.5, 0.5)]
    assert simulate(build("interleaved", 2, 2), times).step_time == 40


def test_when_each_task_runs() -> None:
    timeline = simulate(build("interleaved", 2, 2), ChunkTimes(1, 1, 1))
    spans = {str(span.task): (span.start, span.end) for spans in timeline.spans for span in spans}
    assert spans == {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 6), "0B1": (7, 9),
        "1F0": (1, 2), "1B0": (2, 4), "1F1": (4, 5), "1B1": (5, 7),
    }  # fmt: skip
    assert timeline.span_of(parse("1F1")).start == 4
    with pytest.raises(KeyError):
        timeline.span_of(Task(Kind.F, 5, 0))
    assert timeline.busy == (6, 6)
    assert timeline.idle == (3, 3)


def test_extra_sweeps_take_the_time_given() -> None:
    program = build("simple", 2, 2, sweeps=4)
    assert simulate(program, ChunkTimes(1, 1, 1)).step_time == 9
    # Rank 1 is done with backward at 7, rank 0 at 9. Up: rank 0 9-11, rank 1 10-12.
    # Down: rank 1 12-16, rank 0 14-18.
    assert simulate(program, ChunkTimes(1, 1, 1, {2: 1, 3: 2})).step_time == 18


@settings(deadline=None)
@given(
    st.sampled_from(IN_ONE_PIECE),
    st.lists(st.tuples(TICKS, TICKS, TICKS), min_size=1, max_size=8),
    st.integers(1, 20),
)
def test_a_chain_of_free_transfers_changes_nothing(
    kind: str, times: list[tuple[float, float, float]], microbatches: int
) -> None:
    stages = len(times)
    program = build(kind, stages, microbatches)
    per_chunk = [ChunkTimes(*each) for each in times]
    plain = simulate(program, per_chunk)
    edges = chain(stages)
    moved = simulate(add_transfers(program, edges), per_chunk, edges)
    assert moved.step_time == plain.step_time
    assert moved.busy == plain.busy


def test_messages_take_time() -> None:
    program = build("interleaved", 2, 1)
    edges = chain(2)
    moved = add_transfers(program, edges)
    equal = ChunkTimes(1, 1, 1)
    assert simulate(program, equal, comm=0.5).step_time == 7
    assert simulate(moved, equal, edges, comm=0.5).step_time == 7
    assert simulate(moved, equal, edges, comm={0: 0.25, 2: 2}).step_time == 8.25


def test_a_message_travels_while_another_task_computes() -> None:
    edges = [Edge(0, 0, 0, 1, 0)]
    program = build("simple", 2, 4, backward=False)
    times = [ChunkTimes(1), ChunkTimes(2)]
    early = simulate(add_transfers(program, edges), times, edges, comm=1)
    late = simulate(add_transfers(program, edges, prefetch=0), times, edges, comm=1)
    # Asked for one task early, only the first message is waited for; else every one.
    assert early.step_time == 1 + 1 + 4 * 2
    assert late.step_time == 1 + 4 * (1 + 2)


def test_a_transfer_starts_when_both_ends_are_open() -> None:
    edges = [Edge(0, 0, 0, 1, 0)]
    program = add_transfers(build("simple", 2, 1, backward=False), edges)
    timeline = simulate(program, [ChunkTimes(3), ChunkTimes(1)], edges, comm=2)
    receive, send = timeline.span_of(parse("1R0.0")), timeline.span_of(parse("0S0.0"))
    assert (receive.start, receive.end) == (0, 5)
    assert (send.start, send.end) == (3, 5)


def test_a_program_that_waits_forever_has_no_step_time() -> None:
    program = parse_program("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ProgramError, match=r"rank 0 waits forever before 0B0"):
        simulate(program)


def test_times_for_each_chunk_and_edge() -> None:
    with pytest.raises(ScheduleError, match=r"each of the 3 chunks, or once for all. Received: 2"):
        simulate(build("simple", 3, 1), [ChunkTimes()] * 2)
    edges = chain(2)
    program = add_transfers(build("simple", 2, 1), edges)
    with pytest.raises(ScheduleError, match=r"Received: comm for \[0\], edges lacking: \[2\]"):
        simulate(program, ChunkTimes(), edges, comm={0: 1})
    with pytest.raises(ScheduleError, match=r"no edges given"):
        simulate(build("simple", 2, 1), comm={0: 1})


def test_the_bound_of_published_schedules() -> None:
    whole = [ChunkTimes()] * 4
    assert lower_bound(whole, 8) == 33
    halves = [ChunkTimes(0.5, 0.5, 0.5)] * 8
    assert lower_bound(halves, 8, placement=[0, 1, 2, 3] * 2) == 28.5
    assert lower_bound(whole, 8, split_backward=True) == 27
    in_a_v = [0, 1, 2, 3, 3, 2, 1, 0]
    assert lower_bound(halves, 8, placement=in_a_v, split_backward=True) == 25.5
    assert lower_bound(whole, 8, cores=2) == 48
    assert lower_bound(whole, 1) == 12
    assert lower_bound([ChunkTimes(10, 5, 5), ChunkTimes(1, 0.5, 0.5)], 2) == 40


def test_a_placement_names_every_chunk() -> None:
    with pytest.raises(ScheduleError, match=r"Received: 3 ranks for 2 chunks"):
        lower_bound([ChunkTimes()] * 2, 1, placement=[0, 1, 2])


@settings(deadline=None)
@given(
    st.sampled_from(IN_ONE_PIECE),
    st.lists(st.tuples(TICKS, TICKS, TICKS), min_size=1, max_size=8),
    st.integers(1, 20),
)
def test_nothing_beats_the_bound(kind: str, times: list[tuple[float, float, float]], microbatches: int) -> None:
    per_chunk = [ChunkTimes(*each) for each in times]
    timeline = simulate(build(kind, len(times), microbatches), per_chunk)
    assert timeline.step_time >= lower_bound(per_chunk, microbatches)
    assert timeline.step_time >= lower_bound(per_chunk, microbatches, split_backward=True)
    # Equal stages reach it.
    equal = [per_chunk[0]] * len(times)
    reached = simulate(build(kind, len(times), microbatches), equal).step_time
    assert reached == lower_bound(equal, microbatches)


@settings(deadline=None)
@given(st.data())
def test_nothing_beats_the_bound_with_chunks_and_two_pieces(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(SCHEDULES)))
    schedule = SCHEDULES[kind]
    chunks = data.draw(st.integers(2, 4)) if schedule.more_chunks else schedule.chunks_per_rank
    stages, microbatches = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
    count = stages * chunks
    times = [ChunkTimes(*data.draw(st.tuples(TICKS, TICKS, TICKS))) for _ in range(count)]
    step = simulate(build(kind, stages, microbatches, chunks), times).step_time
    placement = schedule.placement(stages, chunks)
    assert step >= lower_bound(times, microbatches, placement=placement, split_backward=schedule.splits_backward)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_schedules_that_reach_the_bound(stages: int) -> None:
    microbatches = 2 * stages
    for kind in ("zb_h1", "zb_v", "interleaved_1f1b"):
        schedule = SCHEDULES[kind]
        chunks = schedule.chunks_per_rank
        bound = lower_bound(
            [ChunkTimes()] * stages * chunks,
            microbatches,
            placement=schedule.placement(stages, chunks),
            split_backward=schedule.splits_backward,
        )
        assert simulate(build(kind, stages, microbatches)).step_time == bound


def test_two_chunks_of_a_rank_hand_over_without_a_message() -> None:
    # 0F0, message, 1F0, 2F0, message, 3F0, and the same way back.
    program = build("zb_v", 2, 1)
    edges = chain(4)
    times = ChunkTimes(1, 1, 1)
    assert simulate(program, times, comm=10).span_of(parse("0I0")).end == 8 + 40
    assert simulate(add_transfers(program, edges), times, edges, comm=10).span_of(parse("0I0")).end == 8 + 40

"""What the checker lets pass, and what it says about each way to break a program."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.pipeline.errors import ProgramError, ScheduleError
from smp_tf.pipeline.programs.check import _reason, check, marked
from smp_tf.pipeline.programs.replay import Stuck
from smp_tf.pipeline.programs.stash import peak_stash
from smp_tf.pipeline.programs.text import parse_program
from smp_tf.pipeline.programs.transfers import add_transfers
from smp_tf.pipeline.schedules.schedule import SCHEDULES, build, program_of
from smp_tf.pipeline.task import Edge, Kind, Program, Task


def chain(stages: int) -> list[Edge]:
    up = [Edge(chunk, chunk, 0, chunk + 1, 0) for chunk in range(stages - 1)]
    down = [Edge(stages + chunk, chunk + 1, 1, chunk, 1) for chunk in range(stages - 1)]
    return up + down


VARIANTS = [
    (kind, chunks)
    for kind, schedule in SCHEDULES.items()
    for chunks in ((2, 3, 4) if schedule.more_chunks else (schedule.chunks_per_rank,))
]


@pytest.mark.parametrize(("kind", "chunks"), VARIANTS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_every_schedule_runs(kind: str, chunks: int, stages: int) -> None:
    around = {1, 2, 3, stages - 1, stages, stages + 1, 2 * stages - 1, 2 * stages, 3 * stages + 1} - {0}
    runs_with_and_without_transfers(kind, chunks, stages, sorted(around))


@pytest.mark.parametrize(("kind", "chunks"), VARIANTS)
def test_every_schedule_runs_on_many_ranks(kind: str, chunks: int) -> None:
    runs_with_and_without_transfers(kind, chunks, 16, [15, 33] if chunks < 3 else [17])


@pytest.mark.full
# The largest take minutes alone, and longer beside other work.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "chunks"), VARIANTS)
@pytest.mark.parametrize("stages", range(1, 17))
def test_every_schedule_runs_for_every_size(kind: str, chunks: int, stages: int) -> None:
    runs_with_and_without_transfers(kind, chunks, stages, range(1, 65))


def runs_with_and_without_transfers(kind: str, chunks: int, stages: int, sizes: Iterable[int]) -> None:
    edges = chain(stages * chunks)
    for microbatches in sizes:
        program = build(kind, stages, microbatches, chunks)
        check(program)
        check(add_transfers(program, edges), edges)
        stash_is_as_promised(kind, program)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (3, 7), (4, 13)])
def test_groups_larger_than_the_ranks_run_without_prefetch(chunks: int, stages: int, microbatches: int) -> None:
    """Receives that stand before their readers deadlock here, and so do those a moment later than the sender's need."""
    edges = chain(stages * chunks)
    check(add_transfers(build("interleaved_1f1b", stages, microbatches, chunks), edges, prefetch=0), edges)


def stash_is_as_promised(kind: str, program: Program) -> None:
    """By the formulae of the papers, in units of one chunk."""
    stages, microbatches = program.stages, program.microbatches
    own = program.chunks // stages
    peaks = peak_stash(program)
    ranks = range(stages)
    if kind == "simple":
        assert peaks == (microbatches,) * stages
    elif kind == "interleaved":
        assert peaks == tuple(min(stages - rank, microbatches) for rank in ranks)
    elif kind == "interleaved_1f1b":
        # Of groups as large as there are stages where these divide the microbatches, and else of the next larger ones.
        group = math.ceil(microbatches / max(1, microbatches // stages))
        ahead = [2 * (stages - 1 - rank) + (own - 1) * group + 1 for rank in ranks]
        assert peaks == tuple(min(most, microbatches * own) for most in ahead)
    elif kind == "zb_h1":
        assert peaks == (min(stages, microbatches),) * stages
        assert peak_stash(program, Kind.I) == tuple(min(stages - rank, microbatches) for rank in ranks)
    else:
        limit = {"zb_v": stages, "v_half": (stages + 2) // 2, "v_min": (stages + 4) // 3}[kind]
        assert max(peaks) <= 2 * min(limit, microbatches)
        if kind == "zb_v" or microbatches >= 2 * stages:
            assert max(peaks) == 2 * min(limit, microbatches)
        if kind != "v_min" and (kind == "zb_v" or microbatches >= 2 * stages):
            assert min(peaks) == max(peaks)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(VARIANTS),
    st.integers(1, 10),
    st.integers(1, 30),
    st.booleans(),
    st.integers(2, 5),
    st.integers(0, 3),
)
def test_every_variant_runs(
    variant: tuple[str, int], stages: int, microbatches: int, backward: bool, sweeps: int, prefetch: int
) -> None:
    kind, per_rank = variant
    sweeps = sweeps if backward else 2
    program = build(kind, stages, microbatches, per_rank, backward=backward, sweeps=sweeps)
    last = program.chunks - 1
    edges = chain(program.chunks) if backward else chain(program.chunks)[:last]
    edges += [Edge(1000 + to, last, 0, to, None) for to in range(last)]
    for sweep in range(2, sweeps):
        for chunk in range(last):
            source, target = (chunk, chunk + 1) if sweep % 2 == 0 else (chunk + 1, chunk)
            edges.append(Edge(1000 * sweep + chunk, source, sweep, target, sweep))
    check(program)
    check(add_transfers(program, edges, prefetch=prefetch), edges)


def test_two_pieces_chunks_in_a_v_and_updates_run() -> None:
    check(parse_program("0F0 3F0 3I0 0I0 3W0 0W0 0REDUCE 0APPLY\n1F0 2F0 2I0 1I0 2W0 1W0"))


def fails(program: Program | str, *words: str, edges: list[Edge] | None = None) -> None:
    if isinstance(program, str):
        program = parse_program(program)
    with pytest.raises(ProgramError) as error:
        check(program, edges)
    for word in words:
        assert word in str(error.value)


def test_a_task_twice() -> None:
    fails("0F0 0B0 0F0", "Each task is done once. Received: 0F0 on rank 0", "0F0 0B0 >0F0<")


def test_a_task_missing() -> None:
    fails("0F0 0F1 0B0", "a program without 0B1, which belongs on rank 0")
    fails("0F0 0I0", "a program without 0W0")


@pytest.mark.parametrize(
    "alien",
    [
        Task(Kind.F, 0, 2),
        Task(Kind.F, 0, -1),
        Task(Kind.I, 0, 2),
        Task(Kind.T, 0, 0, sweep=2),
        Task(Kind.SEND, 2, 0, edge=0),
        Task(Kind.SEND, 0, 0, edge=7),
        Task(Kind.SEND, 0, edge=0),
        Task(Kind.RECV, 0, 0, edge=1),
    ],
    ids=str,
)
def test_a_task_that_the_program_does_not_have(alien: Task) -> None:
    """Beside all that it has; chunks 0 and 2 are on one rank, so that a transfer may be of the wrong one."""
    edges = [Edge(0, 0, 0, 1, 0), Edge(1, 1, 0, 2, 0), Edge(2, 2, 1, 1, 1), Edge(3, 1, 1, 0, 1)]
    edges.append(Edge(7, 0, None, 1, 0, per="step"))
    program = add_transfers(program_of("interleaved", (0, 1, 0), 2), edges)
    check(program, edges)
    first, *others = program.ranks
    more = Program(((*first, alien), *others), 2, 3, 2)
    fails(more, f"and the transfers of its edges. Received: {alien} on rank 0", edges=edges)


def test_a_sender_has_a_buffer() -> None:
    with pytest.raises(ScheduleError, match="send_buffers"):
        check(parse_program("0F0 0B0"), send_buffers=0)


def test_a_missing_last_microbatch_does_not_go_unnoticed() -> None:
    ranks = build("simple", 1, 2).ranks
    fails(Program(ranks, microbatches=3, chunks=1, sweeps=2), "a program without 0F2")


def test_backward_in_one_piece_and_in_two() -> None:
    fails("0F0 0B0 0I0 0W0", "does B, or I and W, once each", "0F0 >0B0< 0I0 0W0")


def test_a_task_of_a_microbatch_that_does_not_exist() -> None:
    ranks = ((Task(Kind.F, 0, 0), Task(Kind.B, 0, 0), Task(Kind.F, 0, 1)),)
    fails(Program(ranks, microbatches=1, chunks=1, sweeps=2), "Received: 0F1 on rank 0", ">0F1<")


def test_a_task_on_another_rank() -> None:
    fails("0F0 0B0\n1F0 1B0 0REDUCE", "done by the rank of its chunk. Received: 0REDUCE on rank 1")


@pytest.mark.parametrize(
    ("text", "words", "mark"),
    [
        ("0B0 0F0", "0B0 before 0F0 on rank 0", ">0B0< 0F0"),
        ("0F0 0W0 0I0", "0W0 before 0I0 on rank 0", "0F0 >0W0< 0I0"),
        ("0F0 0T2.0 0B0", "0T2.0 before 0B0 on rank 0", "0F0 >0T2.0< 0B0"),
        ("0F0 0REDUCE 0B0", "0REDUCE before 0B0 on rank 0", "0F0 >0REDUCE< 0B0"),
        ("0F0 0B0 0APPLY 0REDUCE", "0APPLY before 0REDUCE on rank 0", "0B0 >0APPLY< 0REDUCE"),
        ("0F0 1F0 0B0 1B0", "0B0 before 1B0 on rank 0", "1F0 >0B0< 1B0"),
    ],
)
def test_out_of_order_on_one_rank(text: str, words: str, mark: str) -> None:
    fails(text, "A task comes after what it depends on", words, mark)


def test_microbatches_out_of_order() -> None:
    fails("0F0 0F1 0B1 0B0", "Received: 0B0 after microbatch 1 on rank 0", "0B1 >0B0<")


def test_ranks_that_wait_for_each_other() -> None:
    fails(
        """
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
        """,
        "Ranks wait for each other forever",
        "rank 0 stands before 0B0 and waits for 1B0 of rank 1",
        "rank 1 stands before 1F1 and waits for 0F1 of rank 0",
        "rank 0: 0F0 >0B0< 0F1 0B1",
        "rank 1: 1F0 >1F1< 1B0 1B1",
    )


def test_of_a_rank_that_is_through_its_list_the_open_transfer_is_told() -> None:
    """It was said to stand before the last receive of its list, which it had opened."""
    program = parse_program("0F0 0R1.0\n1F0 1S1.0")
    send, receive = Task(Kind.SEND, 1, 0, edge=1), Task(Kind.RECV, 0, 0, edge=1)
    assert _reason(program, Stuck(0, 1, (send,)), (0, 1)) == (
        "rank 0 is through its list, and 0R1.0 still waits for 1S1.0 of rank 1"
    )
    assert _reason(program, Stuck(1, 1, (receive,)), (0, 1)) == (
        "rank 1 is through its list, and 1S1.0 still waits for 0R1.0 of rank 0"
    )


UP, DOWN = Edge(0, 0, 0, 1, 0), Edge(1, 1, 1, 0, 1)
BOTH = [UP, DOWN]


def test_a_send_behind_the_task_that_waits_for_its_effect() -> None:
    fails(
        """
        0F0 0R1.0 0B0 0S0.0
        1R0.0 1F0 1B0 1S1.0
        """,
        "rank 0 stands before 0B0 and waits for 0R1.0 of rank 0",
        "rank 1 stands before 1F0 and waits for 1R0.0 of rank 1",
        ">0B0<",
        ">1F0<",
        edges=BOTH,
    )


def test_a_sender_out_of_buffers() -> None:
    # Rank 1 asks for the first tensor of edge 2 only after F1, for which rank 0 has to send edge 0,
    # and rank 0 wants to send the second tensor of edge 2 before that.
    edges = [*BOTH, Edge(2, 0, 0, 1, 1)]
    program = parse_program(
        """
        0F0 0S0.0 0S2.0 0F1 0S2.1 0S0.1 0R1.0 0B0 0R1.1 0B1
        1R0.0 1F0 1R0.1 1F1 1R2.0 1B0 1S1.0 1R2.1 1B1 1S1.1
        """
    )
    fails(
        program,
        "with 1 send buffers per edge and chunk crossed",
        "rank 0 stands before 0S2.1 and waits for the buffer of 0S2.0 of rank 0",
        "rank 1 stands before 1F1 and waits for 1R0.1 of rank 1",
        ">0S2.1<",
        edges=edges,
    )
    check(program, edges, send_buffers=2)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("0S0.0", "a program without 0S0.0, which belongs on rank 0"),
        ("1R0.0", "a program without 1R0.0, which belongs on rank 1"),
    ],
)
def test_one_end_of_a_transfer_missing(lost: str, words: str) -> None:
    text = add_transfers(build("interleaved", 2, 2), BOTH).text()
    fails(re.sub(rf"{re.escape(lost)} ?", "", text, count=1), words, edges=BOTH)


def test_a_receive_behind_its_reader() -> None:
    fails(
        "0F0 0S0.0 0R1.0 0B0\n1F0 1R0.0 1B0 1S1.0",
        "1F0 before 1R0.0 on rank 1",
        "rank 1: >1F0< 1R0.0",
        edges=BOTH,
    )


def test_a_send_before_its_maker() -> None:
    fails("0S0.0 0F0 0R1.0 0B0\n1R0.0 1F0 1B0 1S1.0", "0S0.0 before 0F0", ">0S0.0<", edges=BOTH)


def test_transfers_need_their_edges() -> None:
    text = "0F0 0S0.0 0R1.0 0B0\n1R0.0 1F0 1B0 1S1.0"
    fails(text, "Received: task 0S0.0 on rank 0, and no edges")
    fails(text, "the transfers of its edges. Received: 0R1.0 on rank 0", edges=[UP])


@settings(deadline=None)
@given(st.data())
def test_any_single_task_lost_is_noticed(data: st.DataObject) -> None:
    whole = build(data.draw(st.sampled_from(sorted(SCHEDULES))), 3, data.draw(st.integers(1, 5)))
    edges = chain(whole.chunks)
    program = add_transfers(whole, edges)
    rank = data.draw(st.integers(0, 2))
    lost = data.draw(st.integers(0, len(program.ranks[rank]) - 1))
    ranks = [list(tasks) for tasks in program.ranks]
    del ranks[rank][lost]
    broken = Program(tuple(map(tuple, ranks)), program.microbatches, program.chunks, 2)
    with pytest.raises(ProgramError):
        check(broken, edges)


def test_of_a_long_list_what_is_around_the_mark_is_shown() -> None:
    program = build("simple", 1, 30)
    line = marked(program, {0: 30})
    assert line == ("  rank 0: ... 0F22 0F23 0F24 0F25 0F26 0F27 0F28 0F29 >0B0< 0B1 0B2 0B3 0B4 0B5 0B6 0B7 0B8 ...")

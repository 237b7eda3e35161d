"""Where sends and receives stand, against literal lists and as properties."""

from __future__ import annotations

from collections import Counter
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.pipeline.errors import ProgramError, ScheduleError
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.text import parse_program
from smp_tf.pipeline.programs.transfers import add_transfers
from smp_tf.pipeline.schedules.schedule import SCHEDULES, build
from smp_tf.pipeline.task import Edge, Kind, Program

ONE_CHUNK = sorted(kind for kind, schedule in SCHEDULES.items() if schedule.chunks_per_rank == 1)
UP = Edge(0, 0, 0, 1, 0)
DOWN = Edge(1, 1, 1, 0, 1)


def chain(stages: int, backward: bool = True) -> list[Edge]:
    """An activation up and its gradient down between neighbours."""
    up = [Edge(chunk, chunk, 0, chunk + 1, 0) for chunk in range(stages - 1)]
    down = [Edge(stages + chunk, chunk + 1, 1, chunk, 1) for chunk in range(stages - 1)]
    return up + down if backward else up


def is_text(program: Program, text: str) -> None:
    assert program.text() == dedent(text).strip()


def test_a_chain_of_two() -> None:
    is_text(
        add_transfers(build("interleaved", 2, 3), [UP, DOWN]),
        """
        0F0 0S0.0 0R1.0 0F1 0S0.1 0B0 0R1.1 0F2 0S0.2 0R1.2 0B1 0B2
        1R0.0 1F0 1R0.1 1B0 1S1.0 1F1 1R0.2 1B1 1S1.1 1F2 1B2 1S1.2
        """,
    )


def test_without_prefetch_a_receive_stands_before_its_reader() -> None:
    is_text(
        add_transfers(build("interleaved", 2, 2), [UP, DOWN], prefetch=0),
        """
        0F0 0S0.0 0F1 0S0.1 0R1.0 0B0 0R1.1 0B1
        1R0.0 1F0 1B0 1S1.0 1R0.1 1F1 1B1 1S1.1
        """,
    )


def test_a_result_can_come_as_soon_as_the_receiver_has_done_its_part() -> None:
    is_text(
        add_transfers(build("interleaved", 2, 2), [UP, DOWN, Edge(2, 1, 0, 0, None)]),
        """
        0F0 0S0.0 0R2.0 0R1.0 0F1 0S0.1 0R2.1 0R1.1 0B0 0B1
        1R0.0 1F0 1S2.0 1R0.1 1B0 1S1.0 1F1 1S2.1 1B1 1S1.1
        """,
    )


def test_a_result_of_the_last_sweep() -> None:
    is_text(
        add_transfers(build("simple", 2, 2, backward=False), [UP, Edge(2, 1, 0, 0, None)]),
        """
        0F0 0S0.0 0R2.0 0F1 0S0.1 0R2.1
        1R0.0 1R0.1 1F0 1S2.0 1F1 1S2.1
        """,
    )


def test_a_tensor_that_only_a_later_sweep_reads_is_received_on_the_way_there() -> None:
    is_text(
        add_transfers(build("simple", 2, 2), [UP, DOWN, Edge(2, 0, 0, 1, 1)]),
        """
        0F0 0S0.0 0S2.0 0R1.0 0F1 0S0.1 0S2.1 0R1.1 0B0 0B1
        1R0.0 1R2.0 1R0.1 1R2.1 1F0 1F1 1B0 1S1.0 1B1 1S1.1
        """,
    )


def test_the_middle_of_a_v_is_handed_over_without_a_transfer() -> None:
    is_text(
        add_transfers(build("v_min", 2, 1), chain(4)),
        """
        3R2.0 0F0 0S0.0 3F0 3I0 3S6.0 0R4.0 3W0 0I0 0W0
        1R0.0 1F0 2R6.0 2F0 2S2.0 2I0 1I0 1S4.0 2W0 1W0
        """,
    )


def test_a_receive_is_open_when_its_sender_needs_the_buffer() -> None:
    """Rank 0 runs 0F2 when rank 1 makes the second tensor of edge 1, so 2R1.0 stands before it."""
    is_text(
        add_transfers(build("interleaved_1f1b", 2, 3), chain(4)[:2], prefetch=0),
        """
        0F0 0S0.0 0F1 0S0.1 2R1.0 0F2 0S0.2 2R1.1 2F0 2F1 2R1.2 2F2 2B0 2B1 2B2 0B0 0B1 0B2
        1R0.0 1F0 1S1.0 1R0.1 1F1 1S1.1 1R0.2 1F2 1S1.2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2
        """,
    )


def test_a_shared_weight_goes_once_and_its_gradient_comes_back_once() -> None:
    """The receive of the gradient stood at the end: all averages of that rank began behind its last task."""
    value = Edge(2, 0, None, 1, 0, per="step")
    gradient = Edge(3, 1, 1, 0, None, per="step")
    is_text(
        add_transfers(build("interleaved", 2, 2), [UP, DOWN, value, gradient]),
        """
        0S2 0F0 0S0.0 0R1.0 0F1 0S0.1 0R1.1 0B0 0R3 0B1
        1R0.0 1R2 1F0 1R0.1 1B0 1S1.0 1F1 1B1 1S1.1 1S3
        """,
    )


def test_a_sum_is_asked_for_before_the_last_task_of_its_sweep() -> None:
    """Of a weight of chunk 2, which chunk 1 uses; rank 0 ends with chunk 0, and a third sweep comes behind."""
    gradient = Edge(9, 1, 1, 2, None, per="step")
    is_text(
        add_transfers(build("interleaved_1f1b", 2, 1, 2, sweeps=3), [*chain(4), gradient]),
        """
        2R1.0 0F0 0S0.0 2R6.0 2F0 2S2.0 0R4.0 2B0 2S5.0 2R9 0B0 0T2.0 2T2.0
        1R0.0 3R2.0 1F0 1S1.0 3F0 1R5.0 3B0 3S6.0 1B0 1S4.0 1S9 1T2.0 3T2.0
        """,
    )


def test_the_last_piece_of_backward_stands_behind_the_receive_of_a_sum() -> None:
    is_text(
        add_transfers(build("zb_h1", 2, 2), [UP, DOWN, Edge(2, 1, 1, 0, None, per="step")]),
        """
        0F0 0S0.0 0R1.0 0F1 0S0.1 0I0 0R1.1 0W0 0I1 0R2 0W1
        1R0.0 1F0 1R0.1 1I0 1S1.0 1F1 1I1 1S1.1 1W0 1W1 1S2
        """,
    )


def test_what_all_ranks_get_the_sum_of_is_sent_behind_the_last_task_and_received_before_it() -> None:
    """The gradient of a variable of the script, which every rank has and adds to."""
    edges = [UP, DOWN, Edge(2, 1, 1, 0, None, per="step"), Edge(3, 0, 1, 1, None, per="step")]
    is_text(
        add_transfers(build("simple", 2, 2), edges),
        """
        0F0 0S0.0 0R1.0 0F1 0S0.1 0R1.1 0B0 0R2 0B1 0S3
        1R0.0 1R0.1 1F0 1F1 1B0 1S1.0 1R3 1B1 1S1.1 1S2
        """,
    )


def test_extra_sweeps_go_up_and_down() -> None:
    edges = [Edge(0, 0, 2, 1, 2), Edge(1, 1, 3, 0, 3)]
    is_text(
        add_transfers(build("simple", 2, 1, sweeps=4), edges),
        """
        0F0 0B0 0R1.0 0T2.0 0S0.0 0T3.0
        1F0 1R0.0 1B0 1T2.0 1T3.0 1S1.0
        """,
    )


def test_the_first_piece_of_backward_feeds_the_chunk_before() -> None:
    program = parse_program("0F0 0I0 0W0\n1F0 1I0 1W0")
    is_text(
        add_transfers(program, [DOWN, Edge(2, 1, 1, 0, None)]),
        """
        0R1.0 0R2.0 0F0 0I0 0W0
        1F0 1I0 1S1.0 1W0 1S2.0
        """,
    )


def test_chunks_of_one_rank_need_no_transfer() -> None:
    program = parse_program("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    is_text(
        add_transfers(program, [Edge(0, 0, 0, 1, 0), Edge(1, 1, 0, 2, 0)]),
        """
        0F0 0S0.0 3F0 3B0 0B0
        1R0.0 1F0 2F0 2B0 1B0
        """,
    )


@settings(deadline=None)
@given(st.sampled_from(ONE_CHUNK), st.integers(1, 8), st.integers(1, 20), st.integers(0, 3))
def test_unread_tensors_of_an_edge_are_bounded(kind: str, stages: int, microbatches: int, prefetch: int) -> None:
    edges = {edge.index: edge for edge in chain(stages)}
    program = add_transfers(build(kind, stages, microbatches), list(edges.values()), prefetch=prefetch)
    for tasks in program.ranks:
        unread: Counter[int] = Counter()
        for task in tasks:
            if task.kind is Kind.RECV:
                assert task.edge is not None
                unread[task.edge] += 1
                assert unread[task.edge] <= prefetch + 1
            for edge in edges.values():
                if (task.chunk, task.sweep) == (edge.dst_chunk, edge.dst_sweep) and task.kind is not Kind.W:
                    unread[edge.index] -= 1
                    assert unread[edge.index] >= 0


@st.composite
def programs_with_edges(draw: st.DrawFn) -> tuple[Program, list[Edge], int]:
    kind = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = draw(st.integers(2, 4)) if kind == "interleaved_1f1b" else None
    stages = draw(st.integers(2 if chunks is None else 1, 6 if chunks is None else 4))
    sweeps = draw(st.integers(2, 4))
    program = build(kind, stages, draw(st.integers(1, 12)), chunks, sweeps=sweeps)
    edges = chain(program.chunks)
    visits = st.tuples(st.integers(0, sweeps - 1), st.integers(0, program.chunks - 1))
    for index in range(draw(st.integers(0, 6))):
        a, b = sorted(
            draw(st.lists(visits, min_size=2, max_size=2, unique_by=lambda visit: visit[1])),
            key=lambda visit: program.place_in_step(*visit),
        )
        dst_sweep = None if draw(st.booleans()) else b[0]
        edges.append(Edge(1000 + index, a[1], a[0], b[1], dst_sweep))
    for index in range(draw(st.integers(0, 4))):
        one, other = draw(st.lists(visits, min_size=2, max_size=2, unique_by=lambda visit: visit[1]))
        value, total = (None, other[0]), (one[0], None)
        made_in, read_in = draw(st.sampled_from([value, total]))
        edges.append(Edge(2000 + index, one[1], made_in, other[1], read_in, per="step"))
    return program, draw(st.permutations(edges)), draw(st.integers(0, 3))


@settings(deadline=None)
@given(programs_with_edges())
def test_any_edges_run_with_one_send_buffer_per_chunk_crossed(case: tuple[Program, list[Edge], int]) -> None:
    program, edges, prefetch = case
    with_transfers = add_transfers(program, edges, prefetch=prefetch)
    check(with_transfers, edges)
    for rank in range(program.stages):
        assert with_transfers.compute(rank) == program.ranks[rank]


@pytest.mark.parametrize(
    ("edge", "words"),
    [
        (
            Edge(0, 0, 0, 2, 0),
            r"two of the chunks 0 to 1. Received: edge 0 \(chunk 0 sweep 0 -> chunk 2",
        ),
        (Edge(0, 0, 0, 1, 2), "one of the sweeps 0 to 1"),
        (Edge(0, 1, 0, 1, 1), "within one, no transfer is needed"),
        (Edge(0, 0, None, 1, 0), "sent once per step, and to a reader"),
        (Edge(0, 0, None, 1, None, "step"), "sent once per step, and to a reader"),
        (Edge(0, 1, 0, 0, 0), "order of the sweeps.*whose reader runs before its maker"),
        (Edge(0, 0, 1, 1, 1), "order of the sweeps.*whose reader runs before its maker"),
        (Edge(0, 0, 1, 1, 0), "order of the sweeps.*whose reader runs before its maker"),
    ],
)
def test_edges_that_cannot_be(edge: Edge, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        add_transfers(build("simple", 2, 2), [edge])


def test_an_index_names_one_edge() -> None:
    with pytest.raises(ProgramError, match=r"different indices.*edge 0 .* twice"):
        add_transfers(build("simple", 2, 2), [UP, UP])


def test_transfers_are_added_once() -> None:
    program = add_transfers(build("simple", 2, 1), [UP])
    with pytest.raises(ProgramError, match=r"compute tasks, once. Received: task 0S0\.0 on rank 0"):
        add_transfers(program, [UP])


def test_prefetch_is_not_negative() -> None:
    with pytest.raises(ScheduleError, match=r"prefetch is a whole number, 0 or more. Received: -1"):
        add_transfers(build("simple", 2, 1), [UP], prefetch=-1)

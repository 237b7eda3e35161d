"""Tasks and programs as text, there and back, and what a task cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.pipeline.errors import ProgramError, TaskTextError
from smp_tf.pipeline.programs.kinds import APPLY, KINDS, REDUCE
from smp_tf.pipeline.programs.text import parse, parse_program
from smp_tf.pipeline.schedules.schedule import SCHEDULES, add_transfers, build
from smp_tf.pipeline.task import Edge, Kind, Program, Task

NUMBERS = st.integers(0, 300)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Task(Kind.F, 2, 0), "2F0"),
        (Task(Kind.B, 0, 12), "0B12"),
        (Task(Kind.I, 1, 3), "1I3"),
        (Task(Kind.W, 1, 3), "1W3"),
        (Task(Kind.T, 1, 5, sweep=2), "1T2.5"),
        (Task(Kind.SEND, 0, 2, edge=3), "0S3.2"),
        (Task(Kind.RECV, 4, 2, edge=3), "4R3.2"),
        (Task(Kind.SEND, 0, edge=3), "0S3"),
        (Task(REDUCE, 0), "0REDUCE"),
        (Task(REDUCE, 0, bucket=1), "0REDUCE1"),
        (Task(APPLY, 7), "7APPLY"),
    ],
)
def test_text_of_a_task(task: Task, text: str) -> None:
    assert str(task) == text
    assert parse(text) == task
    assert repr(task) == f"Task('{text}')"


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    kind = draw(st.sampled_from(list(KINDS)))
    chunk = draw(NUMBERS)
    if kind is Kind.T:
        return Task(kind, chunk, draw(NUMBERS), sweep=draw(st.integers(2, 9)))
    if kind.is_transfer:
        return Task(kind, chunk, draw(st.none() | NUMBERS), edge=draw(NUMBERS))
    if kind.is_compute:
        return Task(kind, chunk, draw(NUMBERS))
    return Task(kind, chunk, bucket=draw(st.none() | NUMBERS))


@settings(deadline=None)
@given(tasks())
def test_every_task_survives_its_text(task: Task) -> None:
    assert parse(str(task)) == task


def test_the_hash_of_a_task_is_that_of_numbers_so_the_same_in_every_process() -> None:
    assert hash(Task(Kind.SEND, 3, 2, edge=5)) == hash((ord("S"), 3, 2, 5, 0, 0))
    assert hash(Task(APPLY, 1, bucket=4)) == hash((int.from_bytes(b"APPLY", "big"), 1, 0, 0, 0, 4))


@settings(deadline=None)
@given(tasks(), tasks())
def test_two_tasks_have_one_text_only_if_they_are_equal(one: Task, other: Task) -> None:
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 ", "2f0", "-1F0", "2F0.1", "1T5", "0S"])
def test_what_is_not_a_task(text: str) -> None:
    with pytest.raises(TaskTextError, match=r"Received|in "):
        parse(text)


def test_the_error_shows_how_a_task_is_written() -> None:
    with pytest.raises(TaskTextError) as error:
        parse("2X0")
    assert "chunk, kind, microbatch, for instance 2F0" in str(error.value)
    assert "Received: '2X0'" in str(error.value)


def test_sweeps_belong_to_kinds() -> None:
    assert [Task(kind, 0, 0).sweep for kind in (Kind.F, Kind.B, Kind.I, Kind.W)] == [0, 1, 1, 1]
    assert Task(Kind.SEND, 0, 0, edge=0).sweep is None
    with pytest.raises(ProgramError, match=r"sweep after backward, 2 or more. Received: None"):
        Task(Kind.T, 0, 0)
    with pytest.raises(ProgramError, match=r"kind F has sweep 0. Received: 1"):
        Task(Kind.F, 0, 0, sweep=1)


def test_only_transfers_have_an_edge() -> None:
    with pytest.raises(ProgramError, match=r"kind=SEND, edge=None"):
        Task(Kind.SEND, 0, 0)
    with pytest.raises(ProgramError, match=r"kind=F, edge=1"):
        Task(Kind.F, 0, 0, edge=1)


def test_compute_needs_a_microbatch() -> None:
    with pytest.raises(ProgramError, match=r"kind B needs a microbatch"):
        Task(Kind.B, 0)


@settings(deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 9), st.integers(2, 4))
def test_every_program_survives_its_text(kind: str, stages: int, microbatches: int, sweeps: int) -> None:
    program = build(kind, stages, microbatches, sweeps=sweeps)
    assert parse_program(program.text()) == program
    last = program.chunks - 1
    edges = [Edge(7, 0, 0, last, 0), Edge(8, 0, None, last, 1, "step")]
    if stages > 1:
        program = add_transfers(program, edges)
        assert parse_program(program.text()) == program


def test_comments_and_blank_lines_do_not_count() -> None:
    text = """
        # two ranks
        0F0 0B0   # the first

        1F0 1B0
    """
    program = parse_program(text)
    assert program.text() == "0F0 0B0\n1F0 1B0"
    assert (program.stages, program.chunks, program.microbatches, program.sweeps) == (2, 2, 1, 2)


def test_a_program_needs_a_task() -> None:
    with pytest.raises(TaskTextError, match=r"at least one compute task"):
        parse_program("# nothing\n0S0.0")


def test_placement_names_the_rank_of_each_chunk() -> None:
    v_shape = parse_program("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert v_shape.placement() == (0, 1, 1, 0)
    assert v_shape.stages == 2
    assert v_shape.chunks == 4


def test_a_chunk_is_on_one_rank() -> None:
    with pytest.raises(ProgramError, match=r"chunk 0 on rank 0 and, by task 0F1, on rank 1"):
        parse_program("0F0\n0F1").placement()
    with pytest.raises(ProgramError, match=r"without any task for chunk 1"):
        parse_program("0F0\n2F0").placement()


def test_the_order_in_which_a_microbatch_visits_chunks() -> None:
    program: Program = build("simple", stages=3, microbatches=1, sweeps=3)
    visits = sorted(
        ((sweep, chunk) for sweep in range(3) for chunk in range(3)),
        key=lambda visit: program.place_in_step(*visit),
    )
    assert visits == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0), (2, 0), (2, 1), (2, 2)]

"""Schedules against literal lists, and what they promise about memory."""

from __future__ import annotations

from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.schedule import SCHEDULES, build, in_flight, peak_stash
from smp_tf.pipeline.task import Kind, parse_program

LISTS = {
    ("simple", 1, 2): """
        0F0 0F1 0B0 0B1
    """,
    ("simple", 3, 2): """
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2F1 2B0 2B1
    """,
    ("interleaved", 1, 3): """
        0F0 0B0 0F1 0B1 0F2 0B2
    """,
    ("interleaved", 2, 1): """
        0F0 0B0
        1F0 1B0
    """,
    ("interleaved", 2, 4): """
        0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """,
    ("interleaved", 4, 2): """
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2F1 2B0 2B1
        3F0 3B0 3F1 3B1
    """,
    ("interleaved", 4, 5): """
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4
    """,
}


@pytest.mark.parametrize("case", LISTS, ids=str)
def test_the_lists(case: tuple[str, int, int]) -> None:
    assert build(*case).text() == dedent(LISTS[case]).strip()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_without_backward_only_forwards_are_left(kind: str) -> None:
    program = build(kind, stages=2, microbatches=3, backward=False)
    assert program.text() == "0F0 0F1 0F2\n1F0 1F1 1F2"
    assert program.sweeps == 1


def test_extra_sweeps_follow_the_last_backward() -> None:
    assert (
        build("interleaved", stages=2, microbatches=2, sweeps=4).text()
        == dedent(
            """
            0F0 0F1 0B0 0B1 0T2.0 0T2.1 0T3.0 0T3.1
            1F0 1B0 1F1 1B1 1T2.0 1T2.1 1T3.0 1T3.1
            """
        ).strip()
    )


def test_a_program_knows_its_numbers() -> None:
    program = build("interleaved", stages=3, microbatches=5, sweeps=3)
    numbers = program.stages, program.chunks, program.microbatches, program.sweeps
    assert numbers == (3, 3, 5, 3)
    assert program.placement() == (0, 1, 2)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 64))
def test_stash_of_both_schedules(stages: int, microbatches: int) -> None:
    assert in_flight("simple", stages, microbatches) == (microbatches,) * stages
    assert in_flight("interleaved", stages, microbatches) == tuple(
        min(stages - rank, microbatches) for rank in range(stages)
    )


def test_stash_of_a_backward_in_two_pieces() -> None:
    program = parse_program("0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2")
    assert peak_stash(program) == (2,)
    assert peak_stash(program, freed_by=Kind.I) == (1,)


def test_without_backward_nothing_is_stashed() -> None:
    assert peak_stash(build("simple", 2, 4, backward=False)) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("interleave", "Received: 'interleave'. Did you mean 'interleaved'?"),
        ("Simple", "Did you mean 'simple'?"),
        ("xyz", "one of 'simple', 'interleaved'"),
    ],
)
def test_an_unknown_schedule(kind: str, words: str) -> None:
    with pytest.raises(ScheduleError) as error:
        build(kind, 2, 2)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("stages", "microbatches", "sweeps", "words"),
    [
        (0, 2, 2, "stages is a whole number, 1 or more. Received: 0 (of type int)"),
        (2, -3, 2, "microbatches is a whole number, 1 or more. Received: -3"),
        (2, 2.6, 2, "Received: 2.6 (of type float). The nearest legal value is 3"),
        (2, True, 2, "Received: True (of type bool)"),
        (2, "4", 2, "Received: '4' (of type str)"),
        (2, 2, 1, "sweeps is a whole number, 2 or more. Received: 1"),
    ],
)
def test_illegal_numbers(stages: int, microbatches: int, sweeps: int, words: str) -> None:
    with pytest.raises(ScheduleError) as error:
        build("simple", stages, microbatches, sweeps=sweeps)
    assert words in str(error.value)


def test_sweeps_after_backward_need_backward() -> None:
    with pytest.raises(ScheduleError, match="backward=False, sweeps=3"):
        build("simple", 2, 2, backward=False, sweeps=3)

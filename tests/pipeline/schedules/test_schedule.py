"""Schedules against literal lists, and what they promise about memory."""

from __future__ import annotations

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.stash import stash_profile
from smp_tf.pipeline.schedules.any_placement import interleaved_over, simple_over
from smp_tf.pipeline.schedules.orders import interleaved, simple
from smp_tf.pipeline.schedules.schedule import IN_ORDER, SCHEDULES, build, placement_of, program_of, runs_on
from smp_tf.pipeline.schedules.sweeps import forward_only

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


CHUNKS = {
    ("interleaved_1f1b", 2, 4, 2): """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """,
    ("interleaved_1f1b", 2, 2, 3): """
        0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 3B0 3B1 1B0 1B1
    """,
    # Groups of 3, since 2 stages do not divide 3 microbatches; and a group of 2 for 3 stages.
    ("interleaved_1f1b", 2, 3, 2): """
        0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
        1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2
    """,
    ("interleaved_1f1b", 3, 2, 2): """
        0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1
        1F0 1F1 4F0 4F1 4B0 4B1 1B0 1B1
        2F0 2F1 5F0 5B0 5F1 5B1 2B0 2B1
    """,
    ("zb_h1", 1, 2, None): """
        0F0 0I0 0W0 0F1 0I1 0W1
    """,
    ("zb_h1", 3, 4, None): """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """,
    ("zb_h1", 3, 2, None): """
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1F1 1I0 1I1 1W0 1W1
        2F0 2I0 2F1 2I1 2W0 2W1
    """,
    ("zb_v", 1, 2, None): """
        0F0 1F0 1I0 0I0 1W0 0F1 0W0 1F1 1I1 0I1 1W1 0W1
    """,
    ("zb_v", 2, 3, None): """
        0F0 0F1 3F0 3I0 0F2 3W0 3F1 3I1 0I0 3W1 3F2 3I2 0I1 0W0 0I2 3W2 0W1 0W2
        1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """,
    ("v_half", 3, 4, None): """
        0F0 0F1 5F0 5I0 0F2 5W0 5F1 5I1 5W1 0I0 0F3 0W0 5F2 5I2 5W2 0I1 0W1 5F3 5I3 0I2 5W3 0W2 0I3 0W3
        1F0 4F0 1F1 4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2 4W1 1F3 1I1 4I2 1W1 4F3 4W2 1I2 4I3 1W2 4W3 1I3 1W3
        2F0 3F0 2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2F3 2W1 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3
    """,
    ("v_min", 2, 3, None): """
        0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
        1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """,
}


@pytest.mark.parametrize("case", CHUNKS, ids=str)
def test_the_lists_with_chunks_and_backward_in_two_pieces(case: tuple[str, int, int, int | None]) -> None:
    assert build(*case).text() == dedent(CHUNKS[case]).strip()


def test_a_schedule_knows_where_its_chunks_are() -> None:
    for kind, schedule in SCHEDULES.items():
        assert schedule.name == kind
        for stages in (1, 2, 3, 5):
            program = build(kind, stages, 4)
            assert program.placement() == schedule.placement(stages, schedule.chunks_per_rank)
            assert any(task.kind.name == "I" for task in program.ranks[0]) == schedule.splits_backward
    assert build("interleaved_1f1b", 2, 4, 3).placement() == (0, 1, 0, 1, 0, 1)
    assert build("v_half", 3, 4).placement() == (0, 1, 2, 2, 1, 0)


def test_a_search_tries_every_schedule_and_those_with_one_chunk_on_a_rank_first() -> None:
    assert sorted(IN_ORDER) == sorted(SCHEDULES)
    chunks = [SCHEDULES[kind].chunks_per_rank for kind in IN_ORDER]
    assert chunks == sorted(chunks)


def test_chunks_are_where_the_schedule_has_them() -> None:
    assert placement_of("interleaved", 3) == (0, 1, 2)
    assert placement_of("interleaved_1f1b", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert placement_of("zb_v", 2) == (0, 1, 1, 0)
    assert placement_of("0F0 2F0 2B0 0B0\n1F0 1B0", 2) == (0, 1, 0)
    with pytest.raises(ScheduleError, match="has 1 chunk on each rank"):
        placement_of("zb_h1", 2, 2)


def test_simple_and_interleaved_run_on_any_ranks_and_others_on_their_own() -> None:
    returning = (0, 1, 2, 0)
    assert [kind for kind in SCHEDULES if runs_on(kind, returning)] == ["simple", "interleaved"]
    assert [kind for kind in SCHEDULES if runs_on(kind, (0, 1, 1, 0))] == [
        "simple", "interleaved", "zb_v", "v_half", "v_min",
    ]  # fmt: skip
    assert [kind for kind in SCHEDULES if runs_on(kind, (0, 1, 0, 1, 0, 1))] == [
        "simple", "interleaved", "interleaved_1f1b",
    ]  # fmt: skip
    with pytest.raises(ScheduleError, match=r"'zb_h1' has .* Received: chunks on ranks \(0, 1, 2, 0\)"):
        program_of("zb_h1", returning, 4)


@pytest.mark.parametrize("placement", [(0, 1, 0), (0, 1, 2, 0), (0, 1, 1, 0), (0, 1, 0, 1, 0), (1, 0), (0, 1, 2, 0, 2)])
@pytest.mark.parametrize("kind", ["simple", "interleaved"])
def test_programs_for_any_ranks_can_run(kind: str, placement: tuple[int, ...]) -> None:
    for microbatches in (1, 2, 5, 8):
        program = program_of(kind, placement, microbatches)
        assert program.placement() == placement
        check(program)
        for moments in stash_profile(program):
            for held in moments:
                most = len(placement) if kind == "interleaved" else microbatches
                assert all(count <= min(most - chunk * (kind == "interleaved"), microbatches)
                           for chunk, count in held.items())  # fmt: skip
        check(program_of(kind, placement, microbatches, backward=False))
        check(program_of(kind, placement, microbatches, sweeps=4))


@given(st.integers(1, 8), st.integers(1, 16))
def test_with_one_chunk_on_each_rank_they_are_gpipe_and_1f1b(stages: int, microbatches: int) -> None:
    placement = tuple(range(stages))
    assert simple_over(placement, microbatches) == simple(stages, microbatches)
    assert interleaved_over(placement, microbatches) == interleaved(stages, microbatches)


def test_a_program_has_a_name_or_is_written_down() -> None:
    text = "0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W0 1W1"
    assert program_of(text, (0, 1), 2).text() == text
    assert program_of(text, (0, 1), 2, backward=False).text() == "0F0 0F1\n1F0 1F1"
    assert program_of(text, (0, 1), 2, sweeps=3).text() == (
        "0F0 0F1 0B0 0B1 0T2.0 0T2.1\n1F0 1I0 1F1 1I1 1W0 1W1 1T2.0 1T2.1"
    )
    assert program_of("zb_h1", (0, 1, 2), 4, sweeps=3) == build("zb_h1", 3, 4, sweeps=3)
    with pytest.raises(ScheduleError, match=r"A schedule is one of .*Did you mean 'interleaved'"):
        program_of("interleave", (0, 1), 2)


FORWARD = {
    "simple": "0F0 0F1 0F2\n1F0 1F1 1F2",
    "interleaved": "0F0 0F1 0F2\n1F0 1F1 1F2",
    "interleaved_1f1b": "0F0 0F1 2F0 2F1 0F2 2F2\n1F0 1F1 3F0 3F1 1F2 3F2",
    "zb_h1": "0F0 0F1 0F2\n1F0 1F1 1F2",
    **dict.fromkeys(("zb_v", "v_half", "v_min"), "0F0 0F1 0F2 3F0 3F1 3F2\n1F0 2F0 1F1 2F1 1F2 2F2"),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_without_backward_only_forwards_are_left(kind: str) -> None:
    program = build(kind, stages=2, microbatches=3, backward=False)
    assert program.text() == FORWARD[kind]
    assert program.sweeps == 1
    assert forward_only(build(kind, stages=2, microbatches=3)) == program


def test_extra_sweeps_pass_all_chunks() -> None:
    """Up and down in turn, on each rank the chunk that is farthest on its way first."""
    behind = [tasks[12:] for tasks in build("v_min", stages=2, microbatches=2, sweeps=4)]
    assert [" ".join(map(str, tasks)) for tasks in behind] == [
        "0T2.0 0T2.1 3T2.0 3T2.1 3T3.0 3T3.1 0T3.0 0T3.1",
        "1T2.0 2T2.0 1T2.1 2T2.1 2T3.0 1T3.0 2T3.1 1T3.1",
    ]
    behind = [tasks[8:] for tasks in build("interleaved_1f1b", stages=2, microbatches=2, sweeps=4)]
    assert [" ".join(map(str, tasks)) for tasks in behind] == [
        "0T2.0 0T2.1 2T2.0 2T2.1 2T3.0 2T3.1 0T3.0 0T3.1",
        "1T2.0 1T2.1 3T2.0 3T2.1 3T3.0 3T3.1 1T3.0 1T3.1",
    ]


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


@pytest.mark.parametrize(
    ("kind", "chunks", "words"),
    [
        (
            "interleaved",
            2,
            "'interleaved' has 1 chunk on each rank. Received: chunks_per_rank=2. The nearest legal value",
        ),
        ("zb_v", 3, "'zb_v' has 2 chunks on each rank. Received: chunks_per_rank=3. The nearest legal value is 2"),
        ("zb_v", 3, "'interleaved' takes 1, 'interleaved_1f1b' 2 or more"),
        ("v_min", True, "Received: chunks_per_rank=True"),
        ("v_half", 1, "Received: chunks_per_rank=1"),
        ("interleaved_1f1b", 1, "2 or more. Received: 1 (of type int). The nearest legal value is 2"),
        ("interleaved_1f1b", 2.5, "Received: 2.5 (of type float). The nearest legal value is 3"),
    ],
)
def test_illegal_numbers_of_chunks(kind: str, chunks: int, words: str) -> None:
    with pytest.raises(ScheduleError) as error:
        build(kind, 2, 4, chunks)
    assert words in str(error.value)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_number_of_chunks_can_be_said(kind: str) -> None:
    assert build(kind, 3, 6, SCHEDULES[kind].chunks_per_rank) == build(kind, 3, 6)

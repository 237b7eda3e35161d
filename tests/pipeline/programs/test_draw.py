"""Drawings of simulated steps, literally."""

from __future__ import annotations

from textwrap import dedent

import pytest

from smp_tf.pipeline import task
from smp_tf.pipeline.programs import draw as draw_module
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.draw import draw
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.text import parse_program
from smp_tf.pipeline.schedules import schedule
from smp_tf.pipeline.schedules.schedule import add_transfers, build
from smp_tf.pipeline.task import Edge

BACKWARD_AS_LONG = ChunkTimes(1, 1, 0)


@pytest.mark.parametrize(
    ("kind", "picture"),
    [
        (
            "simple",
            """
            rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
            rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
            rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..
            """,
        ),
        (
            "interleaved",
            """
            rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
            rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
            rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
            """,
        ),
    ],
)
def test_three_stages_four_microbatches(kind: str, picture: str) -> None:
    assert draw(simulate(build(kind, 3, 4), BACKWARD_AS_LONG)) == dedent(picture).strip()
    assert schedule.__doc__ is not None
    for row in dedent(picture).strip().splitlines():
        assert row.removeprefix(row[:8]) in schedule.__doc__


def test_a_task_is_as_wide_as_it_is_long() -> None:
    picture = """
        rank 0  F0 F1 .. .. B0=== .. B1===
        rank 1  .. F0 B0=== F1 B1=== .. ..
    """
    assert draw(simulate(build("interleaved", 2, 2))) == dedent(picture).strip()
    assert draw_module.__doc__ is not None
    for row in dedent(picture).strip().splitlines():
        assert row in draw_module.__doc__


def test_the_unit_of_time_can_be_chosen() -> None:
    timeline = simulate(build("simple", 1, 2), ChunkTimes(1, 1.5, 1.5))
    assert draw(timeline, unit=0.5) == "rank 0  F0=== F1=== B0=============== B1==============="
    assert draw(timeline, unit=1) == "rank 0  F0 F1 B0====== B1======"


def test_longer_names_make_wider_columns() -> None:
    timeline = simulate(build("simple", 2, 1, sweeps=3), ChunkTimes(1, 1, 0, {2: 1}))
    assert (
        draw(timeline)
        == dedent(
            """
            rank 0  F0== .... .... B0== T2.0 ....
            rank 1  .... F0== B0== .... .... T2.0
            """
        ).strip()
    )


def test_chunks_are_named_where_a_rank_has_several() -> None:
    program = parse_program("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert (
        draw(simulate(program, BACKWARD_AS_LONG))
        == dedent(
            """
            rank 0  0F0 ... ... 3F0 3B0 ... ... 0B0
            rank 1  ... 1F0 2F0 ... ... 2B0 1B0 ...
            """
        ).strip()
    )


def test_only_compute_tasks_are_drawn() -> None:
    edges = [Edge(0, 0, 0, 1, 0)]
    program = add_transfers(build("simple", 2, 1, backward=False), edges)
    assert draw(simulate(program, ChunkTimes(), edges)) == "rank 0  F0 ..\nrank 1  .. F0"


def test_a_step_that_takes_no_time() -> None:
    assert draw(simulate(build("simple", 2, 1), ChunkTimes(0, 0, 0))) == "rank 0\nrank 1"


def test_the_vocabulary_shows_a_program_as_it_is_built() -> None:
    edges = [Edge(0, 0, 0, 1, 0), Edge(1, 1, 1, 0, 1)]
    assert task.__doc__ is not None
    for row in add_transfers(build("interleaved", 2, 2), edges).text().splitlines():
        assert row in task.__doc__

"""Each kind of task has a row, and a kind that gets one is known to all that handle tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smp_tf.offline.html import legend
from smp_tf.pipeline.errors import ProgramError, TaskTextError
from smp_tf.pipeline.measure.step_anatomy import PARTS
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.draw import draw
from smp_tf.pipeline.programs.kinds import KINDS, Busy, Row, StashChange, once
from smp_tf.pipeline.programs.places import Places
from smp_tf.pipeline.programs.shared_host import Sharing, simulate_on_hosts
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.stash import peak_stash
from smp_tf.pipeline.programs.text import parse, parse_program
from smp_tf.pipeline.task import Kind, Task
from tests.pipeline.made_up_kind import made_up_kind

LINES = "0F0 0B0 0NOTE1 0F1 0B1\n1F0 1B0 1F1 1B1"


@pytest.fixture
def note() -> Iterator[Kind]:
    row = Row(Places.of_nothing, once, "other", "#123456", "a note is taken")
    with made_up_kind("NOTE", row) as kind:
        yield kind


def test_each_kind_has_a_row() -> None:
    assert len({kind.word for kind in KINDS}) == len({kind.name for kind in KINDS}) == len(KINDS)
    assert [kind for kind, row in KINDS.items() if row.part not in (*PARTS, "message")] == []
    assert [kind for kind, row in KINDS.items() if not row.words] == []
    assert [kind for kind, row in KINDS.items() if (row.stash is not StashChange.IS_LEFT) and not kind.is_compute] == []
    assert [kind for kind, row in KINDS.items() if (row.busy is Busy.MESSAGE) != kind.is_transfer] == []


def test_what_has_no_row_is_no_kind(note: Kind) -> None:
    del KINDS[note]
    with pytest.raises(TaskTextError, match="0NOTE1"):
        parse("0NOTE1")


def test_a_made_up_kind_is_checked_simulated_and_drawn(note: Kind) -> None:
    task = Task(note, 0, bucket=1)
    assert parse("0NOTE1") == task
    program = parse_program(LINES)
    check(program)
    timeline = simulate(program, once={task: 2.0})
    assert timeline.span_of(task).end - timeline.span_of(task).start == 2.0
    assert timeline.step_time == simulate(program).step_time + 2.0
    assert timeline.busy == (8.0, 6.0)
    first, _ = draw(timeline, unit=1.0).splitlines()
    assert first == "rank 0  F0=== ..... ..... ..... B0========= NOTE1====== F1=== ..... ..... ..... B1========="
    shared = simulate_on_hosts(program, ChunkTimes(), None, Sharing((0, 1), 1.0, 1.0), once={task: 2.0})
    assert shared.step_time == timeline.step_time
    assert peak_stash(program) == (1, 1)
    assert "a note is taken" in legend(span.task.kind for span in timeline.spans[0])


def test_a_made_up_kind_comes_after_what_its_row_says() -> None:
    row = Row(Places.of_gradients, once, "other", None, "a note is taken")
    with made_up_kind("NOTE", row), pytest.raises(ProgramError, match="0NOTE1 before 0B1 on rank 0"):
        check(parse_program(LINES))


def test_what_is_done_with_other_replicas_goes_on_beside_the_rank() -> None:
    row = Row(Places.of_nothing, once, "reduce", None, "a note is sent to replicas", busy=Busy.LINE)
    with made_up_kind("NOTE", row):
        program = parse_program(LINES)
        timeline = simulate(program, once={parse("0NOTE1"): 2.0})
        assert timeline.step_time == simulate(program).step_time
        assert draw(timeline, unit=1.0).splitlines()[1].split()[0] == "NOTE1======"

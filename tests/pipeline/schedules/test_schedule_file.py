"""Schedules that somebody wrote: what is read, and what is said about each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.schedules import schedule_file
from smp_tf.pipeline.schedules.schedule import SCHEDULES, build
from smp_tf.pipeline.schedules.schedule_file import load_schedule
from smp_tf.pipeline.schedules.sweeps import forward_only, with_sweeps


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_comes_back_from_its_file(kind: str, tmp_path: Path) -> None:
    program = build(kind, 3, 6)
    file = tmp_path / "schedule.txt"
    file.write_text(f"# {kind}\n\n{program.text()}\n", encoding="utf-8")
    assert load_schedule(file, 3, 6) == program
    assert load_schedule(program.text(), 3, 6) == program


def test_it_may_say_itself_how_many_ranks_and_microbatches_it_has() -> None:
    assert load_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1") == build("interleaved", 2, 2)
    with pytest.raises(ScheduleError, match=r"a program without 1B1"):
        load_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1")


def test_one_of_a_kind() -> None:
    """Backward in one piece on a rank and in two on another, chunks dealt out as nobody else does."""
    program = load_schedule("0F0 1F0 1B0 0B0 # both\n2F0 2I0 2W0", stages=2, microbatches=1)
    assert program.placement() == (0, 0, 1)
    assert (program.chunks, program.microbatches, program.sweeps) == (3, 1, 2)
    assert forward_only(program).text() == "0F0 1F0\n2F0"
    check(with_sweeps(program, 4))


def test_the_example_of_the_module_runs() -> None:
    assert schedule_file.__doc__ is not None
    drawn = [line for line in schedule_file.__doc__.splitlines() if line.startswith("    ")]
    assert load_schedule("\n".join(drawn), 2, 3).microbatches == 3


MISTAKES = [
    ("0F0 0B0\n\n1F0 1B0", 3, 1, "line 3: A schedule has one line per rank, for 3 ranks 3 lines. Received: 2"),
    ("0F0 0B0\n1F0 1B0", 1, 1, "line 2: A schedule has one line per rank, for 1 ranks 1 lines. Received: 2"),
    ("0F0 0B0", 1, 2, "as many microbatches as a step has, 2. Received: one of 1"),
    ("0F0 0B0\n1F0 1B0 1F1", 2, 1, "line 2: A task is for one of the microbatches that a step runs, 0 to 0. Received"),
    ("0F0 0B0\n1F0 1X0", 2, 1, "line 2: A task is written as chunk, kind, microbatch"),
    ("0F0\n\n1F0", 2, 1, "line 1: Every chunk does every microbatch. Received: a program without 0B0"),
    ("# me\n0F0 0F1 0B1 0B0", 1, 2, "line 2: A chunk takes the microbatches of a sweep in order"),
    ("0F0 0B0 0F1 0B1\n#\n1F0 1F1 1B0 1B1", 2, 2, "line 1, line 3: Ranks wait for each other forever"),
    ("0F0 0B0\n0F1 0B1", 2, 2, "line 2: A chunk is run by one rank. Received: chunk 0 on rank 0 and"),
    ("0F0 0B0\n2F0 2B0", 2, 1, "Each of the 3 chunks is run by a rank. Received: a program without any"),
    ("0F0 0S0.0 0B0", 1, 1, "line 1: A schedule lists F, B, I and W tasks; all others are put in by smp_tf"),
    ("0F0 0B0 0APPLY", 1, 1, "Received: 0APPLY"),
    ("0F0 0B0 0F0", 1, 1, "line 1: Each task is done once. Received: 0F0 on rank 0"),
    ("# nothing\n", 1, 1, "lists the tasks of a rank on a line, such as 0F0 0B0. Received: no task"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "stages", "microbatches", "words"), MISTAKES)
def test_a_mistake_is_shown_with_file_line_and_rule(
    text: str, stages: int, microbatches: int, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text, encoding="utf-8")
    for source, name in ((file, str(file)), (text, "the schedule")):
        with pytest.raises(ScheduleError) as error:
            load_schedule(source, stages, microbatches)
        assert words in str(error.value)
        assert str(error.value).startswith((f"{name}, line ", f"{name}: "))


def test_a_path_is_no_text() -> None:
    with pytest.raises(ScheduleError, match=r"Received: 'mine.txt'. The path of a file is given as pathlib.Path"):
        load_schedule("mine.txt", 1, 1)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"nowhere.txt: A schedule is a text file that can be read. Received: .*No"):
        load_schedule(tmp_path / "nowhere.txt", 1, 1)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="can be read"):
        load_schedule(tmp_path / "bytes", 1, 1)


def test_numbers_are_whole() -> None:
    with pytest.raises(ScheduleError, match="stages is a whole number"):
        load_schedule("0F0 0B0", 0, 1)

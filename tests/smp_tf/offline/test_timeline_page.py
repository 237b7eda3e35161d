"""The report and the page of a timeline say what was recorded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from smp_tf.command import main as command_line
from smp_tf.errors import TimelineError
from smp_tf.offline.timeline_page import page
from smp_tf.offline.timeline_text import replicas_of, text
from smp_tf.pipeline.measure.recorded import RankRecord, TaskRun
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.text import parse
from smp_tf.recording import timeline_file
from tests.pipeline.recorded_steps import program, recorded
from tests.smp_tf.offline.test_plan_page import read

MILLISECOND = 10**6
PLANNED = program(2, 2)
TIMES = [ChunkTimes(10 * MILLISECOND, 10 * MILLISECOND, 10 * MILLISECOND)] * 2


def records(replicas: int = 1) -> list[RankRecord]:
    """Of each rank a step of 100 ms, and 150 ms more until the next one; a message takes 5 ms."""
    found = []
    for replica in range(replicas):
        steps, _ = recorded(PLANNED, TIMES, comm=5 * MILLISECOND)
        for stage, step in enumerate(steps):
            end = 100 * MILLISECOND
            step = replace(step, end=end, until=5 * end // 2)
            ranks = (2 * replica, 2 * replica + 1)
            found.append(RankRecord(ranks[stage], stage, ranks, "host 1", {5: PLANNED}, (step,)))
    return found


def test_the_report_says_where_the_time_went() -> None:
    said = text(replicas_of(records()))
    rows = [re.findall(r"[\d.]+ ?(?:ms|s|%)?", line) for line in said.splitlines() if line.startswith("│")]
    # rank, stage, step, compute, bubble, message, reduce, apply, input, other
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0", "0", "250 ms", "24%", "12%", "4%", "0%", "0%", "60%", "0%"],
        ["1", "1", "250 ms", "24%", "4%", "2%", "0%", "0%", "60%", "10%"],
    ]
    assert "all tasks ran one after the other, in the order of the plan" in said
    assert "step 10 of train: pipeline 100 ms, bubble 40.0%; by the plan with these times of tasks 90 ms, 33.3%" in said


def test_the_page_draws_every_task_and_frames_the_critical_path() -> None:
    drawn = page(replicas_of(records()), "a <folder>")
    found = read(drawn)
    tasks = [title for title in found.titles if re.match(r"\d[FB]\d:", title)]
    assert [title.partition(":")[0] for title in tasks] == ["0F0", "0F1", "0B0", "0B1", "1F0", "1B0", "1F1", "1B1"]
    critical = [title.partition(":")[0] for title in tasks if title.endswith("on the critical path")]
    assert critical == ["0F0", "0B1", "1F0", "1B0", "1F1", "1B1"]
    assert tasks[0] == "0F0: 10 ms, from 0 ms, on the critical path"
    assert "Critical path: 100 ms, of which 90 ms in tasks and 10 ms between them. 0F0 1F0 1B0 1F1 1B1 0B1" in drawn
    waits = [title for title in found.titles if title.startswith("waiting for a message")]
    assert waits == ["waiting for a message: 5 ms"] * 3
    assert "a &lt;folder&gt;" in drawn
    assert "<folder>" not in drawn
    assert "http" not in drawn.replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_replicas_stand_one_after_the_other() -> None:
    replicas = replicas_of(records(replicas=2))
    assert [replica.ranks for replica in replicas] == [(0, 1), (2, 3)]
    drawn = page(replicas, "run")
    assert [f"Replica {n}" in drawn for n in range(3)] == [True, True, False]
    assert read(drawn).counts["svg"] == 2
    said = text(replicas)
    assert said.index("replica 0:") < said.index("replica 1:")


def test_what_is_missing_is_said() -> None:
    [first, _] = records()
    [replica] = replicas_of([replace(first, dropped=3)])
    assert list(replica.said()) == [
        "rank 0: 3 moments were not kept; record fewer steps at a time",
        "no file of rank 1: what is waited for from there counts as bubble",
        "all tasks ran one after the other, in the order of the plan",
    ]
    drawn = page([replica], "run")
    assert ">rank 1</text>" in drawn
    assert replica.spent(0)["message"] == 0


def test_tasks_that_did_not_run_as_planned_are_said() -> None:
    first, second = records()
    runs = [TaskRun(parse(name), 10 * n, 10 * n + 10) for n, name in enumerate(("0F0", "0B0", "0F1", "0B1"))]
    step = replace(first.steps[0], tasks=tuple(runs))
    [replica] = replicas_of([replace(first, steps=(step,)), second])
    assert "step 10: on rank 0, 0B0 and 0F1 did not run as planned" in list(replica.said())


def test_only_some_of_many_steps_are_drawn() -> None:
    first, second = records()
    many = [
        replace(record, steps=tuple(replace(record.steps[0], step=number) for number in range(10)))
        for record in (first, second)
    ]
    drawn = page(replicas_of(many), "run")
    assert read(drawn).counts["svg"] == 8
    assert "2 more steps were recorded, and are not drawn" in drawn


def test_nothing_recorded_is_an_error() -> None:
    with pytest.raises(TimelineError, match="No step was recorded"):
        replicas_of([replace(record, steps=()) for record in records()])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for record in records():
        timeline_file.write(tmp_path / f"rank_{record.rank}.json", [record])
    html, trace = tmp_path / "out.html", tmp_path / "merged.json"
    asked = ["timeline", str(tmp_path), "--html", str(html), "--trace", str(trace)]
    assert command_line.main(asked) == 0
    said = capsys.readouterr()
    assert "where the time of a step went" in said.out
    assert f"wrote {html}" in said.err
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert timeline_file.read([trace]) == records()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{folder}/none.json"], "none.json cannot be read: No such file"),
        (["{folder}"], "has none of them"),
        (["{folder}", "--html", "{folder}/no/out.html"], "There is no folder"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert command_line.main(["timeline", *(word.format(folder=tmp_path) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("smp-tf: ")
    assert said in error

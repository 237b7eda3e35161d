"""A timeline's file is one that trace viewers read, and what was recorded comes back from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smp_tf.errors import TimelineError
from smp_tf.pipeline.measure.recorded import RankRecord, TaskRun
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.text import parse
from smp_tf.recording import timeline_file
from tests.pipeline.recorded_steps import program, recorded

#: Some weeks after the machine was started.
SINCE_START = 4_000_000_123_456_789


def records(stages: int = 2) -> list[RankRecord]:
    planned = program(stages, 3)
    steps, _ = recorded(planned, [ChunkTimes(1001, 2002, 3003)] * stages, comm=77)
    found = []
    for stage, step in enumerate(steps):
        update = TaskRun(parse(f"{stage}APPLY"), step.end + 10, step.end + 30)
        step = replace(step, tasks=(*step.tasks, update), until=step.end + 41)
        record = RankRecord(stage, stage, tuple(range(stages)), "host 17", {5: planned}, (step,))
        found.append(record.shifted(SINCE_START))
    return found


def events(made: list[RankRecord], kind: str) -> list[dict[str, Any]]:
    return [event for event in timeline_file.trace(made)["traceEvents"] if event["ph"] == kind]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    made = records()
    for record in made:
        timeline_file.write(tmp_path / "sub" / f"rank_{record.rank}.json", [record])
    assert timeline_file.read([tmp_path / "sub"]) == made
    files = sorted((tmp_path / "sub").iterdir())
    assert [file.name for file in files] == ["rank_0.json", "rank_1.json"]
    assert timeline_file.read(reversed(files)) == made
    # All in one file.
    timeline_file.write(tmp_path / "merged.json", made)
    assert timeline_file.read([tmp_path / "merged.json"]) == made


def test_it_is_a_trace_that_viewers_show() -> None:
    made = records()
    names = {event["pid"]: event["args"]["name"] for event in events(made, "M") if event["name"] == "process_name"}
    assert names == {0: "rank 0, stage 0", 1: "rank 1, stage 1"}
    spans = events(made, "X")
    assert [span["name"] for span in spans if span["pid"] == 0 and span["cat"] != "WAIT"] == [
        "step 10 of train", "0F0", "0F1", "0B0", "0F2", "0B1", "0B2", "0APPLY",
    ]  # fmt: skip
    first = spans[1]
    # Microseconds, on the clock that the other ranks have.
    assert (first["ts"], first["dur"]) == (SINCE_START / 1000, 1.001)
    assert first["cat"] == "F"
    # Spans of a row lie beside or within each other, as viewers want it.
    for pid, tid in {(span["pid"], span["tid"]) for span in spans}:
        row = [(s["ts"], s["ts"] + s["dur"]) for s in spans if (s["pid"], s["tid"]) == (pid, tid)]
        for begin, end in row:
            assert all(b >= end or e <= begin or (b <= begin and end <= e) or (begin <= b and e <= end) for b, e in row)


def test_waits_fill_the_gaps_until_a_message_comes() -> None:
    made = records()
    found = [span for span in events(made, "X") if span["cat"] == "WAIT"]
    began = SINCE_START / 1000
    told = {(s["pid"], s["name"]): (round(1000 * (s["ts"] - began)), round(1000 * s["dur"])) for s in found}
    assert told == {
        # The first stage is done with F1 at 2002, the second one sends the first gradient at 7084, for 77.
        (0, "wait for 0R2.0"): (2002, 7084 + 77 - 2002),
        (0, "wait for 0R2.2"): (13167 + 5005, 1155),
        (1, "wait for 1R0.0"): (0, 1001 + 77),
        (1, "wait for 1R0.2"): (8085 + 5005, 154),
    }
    assert {span["args"]["peer"] for span in found if span["pid"] == 0} == {1}


def test_messages_begin_and_end_under_one_name() -> None:
    made = records()
    begun, ended = events(made, "b"), events(made, "e")
    assert len(begun) == len(ended) == sum(len(record.steps[0].messages) for record in made)
    assert {event["id"] for event in begun} == {event["id"] for event in ended}
    assert len({event["id"] for event in begun}) == len(begun)
    [sent] = [event for event in begun if event["name"] == "0S0.1"]
    assert sent["args"] == {"program": 5, "step": 10, "peer": 1, "bytes": 64, "tensor": "net/first/Relu:0"}


def test_arrows_lead_from_the_task_that_made_a_tensor_to_the_one_that_reads_it() -> None:
    made = records()
    spans = {(span["pid"], span["name"]): span for span in events(made, "X")}

    def at(end: dict[str, Any]) -> str:
        found = [
            name
            for (pid, name), span in spans.items()
            if pid == end["pid"] and span["cat"] != "step" and span["ts"] <= end["ts"] < span["ts"] + span["dur"]
        ]
        [name] = found
        return name

    begins = {event["id"]: at(event) for event in events(made, "s")}
    ends = {event["id"]: at(event) for event in events(made, "f")}
    arrows = sorted((begins[name], ends[name]) for name in ends)
    assert arrows == [*((f"0F{m}", f"1F{m}") for m in range(3)), *((f"1B{m}", f"0B{m}") for m in range(3))]
    # What nobody on the other rank computes with, the loss, is sent and leads nowhere.
    assert sorted(begins[name] for name in begins.keys() - ends.keys()) == ["1F0", "1F1", "1F2"]


def test_what_is_reduced_at_the_same_time_has_rows_of_its_own() -> None:
    [record, _] = records()
    [step] = record.steps
    times = {"0REDUCE0": (-900, -300), "0REDUCE1": (-500, 10), "0REDUCE2": (-250, 20)}
    reduced = tuple(TaskRun(parse(name), step.end + begin, step.end + end) for name, (begin, end) in times.items())
    made = [replace(record, steps=(replace(step, tasks=(*step.compute, *reduced, *step.updates)),))]
    names = {event["tid"]: event["args"]["name"] for event in events(made, "M") if event["name"] == "thread_name"}
    assert names == {0: "tasks", 1: "reduce, apply", 2: "reduce, apply +"}
    rows = {span["name"]: span["tid"] for span in events(made, "X") if span["tid"]}
    assert rows == {"0REDUCE0": 1, "0REDUCE1": 2, "0REDUCE2": 1, "0APPLY": 2}


def changed(tmp_path: Path, change: Any) -> Path:
    file = tmp_path / "rank_0.json"
    timeline_file.write(file, records()[:1])
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content.pop("smp_tf"), "is no timeline that smp_tf has written: KeyError"),
        (lambda content: content["smp_tf"].update(version=2), "a timeline of version 2; this smp_tf reads version 1"),
        (lambda content: content["traceEvents"][6].update(name="0Q0"), "is no timeline .* TaskTextError"),
        (lambda content: content["smp_tf"]["ranks"][0].pop("stage"), "is no timeline .* KeyError: 'stage'"),
    ],
)
def test_what_is_no_timeline_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    with pytest.raises(TimelineError, match=said):
        timeline_file.read([changed(tmp_path, change)])


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first, second = records()
    timeline_file.write(tmp_path / "rank_0.json", [first])
    timeline_file.write(tmp_path / "rank_1.json", [replace(second, job="host 18")])
    with pytest.raises(TimelineError, match="those of one run"):
        timeline_file.read([tmp_path])
    with pytest.raises(TimelineError, match=r"one file of each rank\. Received two of rank 0"):
        timeline_file.read([tmp_path / "rank_0.json", tmp_path / "rank_0.json"])


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match="cannot be read: No such file"):
        timeline_file.read([tmp_path / "rank_0.json"])
    with pytest.raises(TimelineError, match="has none of them"):
        timeline_file.read([tmp_path])

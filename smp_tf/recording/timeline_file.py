"""Writes and reads timelines as files in Chrome's trace format, which chrome://tracing and Perfetto show.

A file holds what one rank, or several, recorded. The key "smp_tf" next to the events says what was planned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from smp_tf.errors import TimelineError
from smp_tf.files.durable_files import write_file
from smp_tf.pipeline.errors import ProgramError, TaskTextError
from smp_tf.pipeline.measure.recorded import (
    Message,
    ProgramRecord,
    RankRecord,
    RecordedStep,
    TaskRun,
    rows_of,
    waits_of,
)
from smp_tf.pipeline.programs.text import parse, parse_program
from smp_tf.pipeline.task import Edge, Kind

VERSION = 1

#: Rows of a rank: its steps and tasks, then its updates of weights, in as many rows as go on at once. Messages overlap,
#: so they and the arrows that join them have rows of their own.
_TASKS, _UPDATES = 0, 1
_NAMES = ("tasks", "reduce, apply")
#: The name for the time between two tasks in which the second waits for a message. Only viewers read it.
_WAIT = "WAIT"


def trace(records: Sequence[RankRecord]) -> dict[str, Any]:
    """Writes records as an object in Chrome's trace format.

    Args:
        records: records of the ranks, on one clock.
    """
    events = [event for record in records for event in _events(record)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "smp_tf": {"version": VERSION, "ranks": _heads(records)}}


def write(path: Path, records: Sequence[RankRecord]) -> None:
    """Writes records to a file.

    Args:
        path: path of the file. An existing file is replaced in one piece.
        records: records of the ranks, on one clock.
    """
    write_file(path, json.dumps(trace(records), separators=(",", ":")))


def read(paths: Iterable[Path]) -> list[RankRecord]:
    """Reads records.

    Args:
        paths: files, or folders with a file of each rank, as a recording writes them.

    Returns:
        One record for each rank, in the order of ranks.

    Raises:
        TimelineError: a file is no timeline, or two are of one rank or of different runs.
    """
    found: dict[int, tuple[Path, RankRecord]] = {}
    for path in _files(paths):
        for record in _read(path):
            if record.rank in found:
                raise TimelineError(
                    f"A timeline has one file of each rank. Received two of rank {record.rank}: "
                    f"{found[record.rank][0]} and {path}."
                )
            found[record.rank] = path, record
    first = next(iter(found.values()), None)
    for path, record in found.values():
        assert first is not None
        if record.job != first[1].job:
            raise TimelineError(
                f"The files of a timeline are those of one run. Received {first[0]} of one run and {path} of another. "
                f"Delete the older files of the folder."
            )
    return [found[rank][1] for rank in sorted(found)]


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.glob("rank_*.json"))
        if not inside:
            raise TimelineError(f"A recording writes rank_0.json, rank_1.json and so on. {path} has none of them.")
        yield from inside


def _read(path: Path) -> list[RankRecord]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        heads = found["smp_tf"]
        if heads["version"] != VERSION:
            raise TimelineError(
                f"{path} is a timeline of version {heads['version']}; this smp_tf reads version {VERSION}."
            )
        return [_record(head, found["traceEvents"]) for head in heads["ranks"]]
    except OSError as error:
        raise TimelineError(f"{path} cannot be read: {error.strerror}.") from error
    except TimelineError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ProgramError, TaskTextError) as error:
        raise TimelineError(
            f"{path} is no timeline that smp_tf has written: {type(error).__name__}: {error}. Name files that "
            f"smp.timeline or smp.callbacks.Timeline has written, or the folder with them."
        ) from error


def _heads(records: Sequence[RankRecord]) -> list[dict[str, Any]]:
    return [
        {
            "rank": record.rank,
            "stage": record.stage,
            "ranks": list(record.ranks),
            "job": record.job,
            "dropped": record.dropped,
            "programs": {
                str(number): {
                    "name": program.name,
                    "schedule": program.schedule,
                    "planned": program.planned.text().splitlines(),
                    "edges": [list(astuple(edge)) for edge in program.edges],
                    "tensors": {str(edge): words for edge, words in program.tensors.items()},
                }
                for number, program in record.programs.items()
            },
        }
        for record in records
    ]


def _events(record: RankRecord) -> Iterator[dict[str, Any]]:
    rank = record.rank
    of = {"pid": rank, "tid": _TASKS}
    yield {"ph": "M", "name": "process_name", **of, "args": {"name": f"rank {rank}, stage {record.stage}"}}
    yield {"ph": "M", "name": "process_sort_index", **of, "args": {"sort_index": rank}}
    updates = rows_of(run for step in record.steps for run in step.updates)
    row_of = {id(run): _UPDATES + number for number, row in enumerate(updates) for run in row}
    for row, words in enumerate([*_NAMES, *(f"{_NAMES[_UPDATES]} +" for _ in updates[1:])]):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": words}}
    for step in record.steps:
        program = record.programs[step.program]
        common = {"program": step.program, "step": step.step}
        yield {
            "ph": "X", "name": f"step {step.step} of {program.name}", "cat": "step", **of,
            **_times(step.begin, step.end), "args": {**common, "until": _microseconds(step.until)},
        }  # fmt: skip
        for run in step.tasks:
            yield {
                "ph": "X", "name": str(run.task), "cat": run.task.kind.name, "pid": rank,
                "tid": row_of.get(id(run), _TASKS),
                **_times(run.begin, run.end), "args": common,
            }  # fmt: skip
        for wait in waits_of(step, program):
            yield {
                "ph": "X", "name": f"wait for {wait.message.task}", "cat": _WAIT, **of, **_times(wait.begin, wait.end),
                "args": {**common, "peer": wait.message.peer},
            }  # fmt: skip
        for message in step.messages:
            yield from _message_events(record, step, message, program)
            yield from _arrow_end(record, step, message, program)


def _message_events(
    record: RankRecord, step: RecordedStep, message: Message, program: ProgramRecord
) -> Iterator[dict[str, Any]]:
    """Yields a message as an asynchronous event, since messages of a rank overlap."""
    task = message.task
    assert task.edge is not None
    name = {
        "name": str(task), "cat": task.kind.name, "pid": record.rank, "tid": _TASKS,
        "id": f"{record.rank}.{step.program}.{step.step}.{task}",
    }  # fmt: skip
    args = {
        "program": step.program, "step": step.step, "peer": message.peer, "bytes": message.bytes,
        "tensor": program.tensors.get(task.edge, ""),
    }  # fmt: skip
    yield {"ph": "b", **name, "ts": _microseconds(message.begin), "args": args}
    yield {"ph": "e", **name, "ts": _microseconds(message.end)}


def _arrow_end(
    record: RankRecord, step: RecordedStep, message: Message, program: ProgramRecord
) -> Iterator[dict[str, Any]]:
    """Yields one end of the arrow from the task that made a message to the first one that read it.

    Viewers join ends of the same name, in whatever file they are. They attach each end to the task that runs at its
    time.
    """
    task = message.task
    edge = next(edge for edge in program.edges if edge.index == task.edge)
    sends = task.kind is Kind.SEND
    chunk, sweep = (edge.src_chunk, edge.src_sweep) if sends else (edge.dst_chunk, edge.dst_sweep)
    runs = [
        run
        for run in step.compute
        if (run.task.chunk, run.task.sweep) == (chunk, sweep) and task.microbatch in (None, run.task.microbatch)
    ]
    runs = [run for run in runs if (run.end <= message.begin if sends else run.begin >= message.end)]
    if not runs:
        return
    ranks = (record.rank, message.peer) if sends else (message.peer, record.rank)
    name = ".".join(map(str, (*ranks, step.program, step.step, task.edge, task.microbatch)))
    arrow = {"name": "message", "cat": "message", "id": name, "pid": record.rank, "tid": _TASKS}
    if sends:
        yield {"ph": "s", **arrow, "ts": _microseconds(runs[-1].end - 1)}
    else:
        yield {"ph": "f", "bp": "e", **arrow, "ts": _microseconds(runs[0].begin)}


def _times(begin: int, end: int) -> dict[str, float]:
    return {"ts": _microseconds(begin), "dur": _microseconds(end - begin)}


def _microseconds(nanoseconds: int) -> float:
    """Returns a time in the format's unit. A double holds thousandths of it, for as long as a machine runs."""
    return nanoseconds / 1000


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def _record(head: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> RankRecord:
    rank = head["rank"]
    mine = [event for event in events if event["pid"] == rank and event["ph"] in ("X", "b", "e")]
    ends = {event["id"]: _nanoseconds(event["ts"]) for event in mine if event["ph"] == "e"}
    tasks: dict[tuple[int, int], list[TaskRun]] = {}
    messages: dict[tuple[int, int], list[Message]] = {}
    steps = []
    for event in mine:
        if event["ph"] == "e" or event["cat"] == _WAIT:
            continue
        args, begin = event["args"], _nanoseconds(event["ts"])
        of = args["program"], args["step"]
        if event["ph"] == "b":
            message = Message(parse(event["name"]), args["peer"], begin, ends[event["id"]], args["bytes"])
            messages.setdefault(of, []).append(message)
        elif event["cat"] == "step":
            steps.append((of, begin, begin + _nanoseconds(event["dur"]), _nanoseconds(args["until"])))
        else:
            run = TaskRun(parse(event["name"]), begin, begin + _nanoseconds(event["dur"]))
            tasks.setdefault(of, []).append(run)
    return RankRecord(
        rank,
        head["stage"],
        tuple(head["ranks"]),
        head["job"],
        {int(number): _program(program) for number, program in head["programs"].items()},
        tuple(
            RecordedStep(*of, begin, end, until, tuple(tasks.get(of, ())), tuple(messages.get(of, ())))
            for of, begin, end, until in steps
        ),
        head["dropped"],
    )


def _program(stored: Mapping[str, Any]) -> ProgramRecord:
    return ProgramRecord(
        stored["name"],
        stored["schedule"],
        parse_program("\n".join(stored["planned"])),
        tuple(Edge(*edge) for edge in stored["edges"]),
        {int(edge): words for edge, words in stored["tensors"].items()},
    )

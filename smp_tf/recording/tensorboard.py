"""Writes a timeline for TensorBoard's profile plugin. Its trace viewer shows every rank as a host.

path/plugins/profile/timeline/rank_0.xplane.pb      found by `tensorboard --logdir path`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smp_tf import tf_internals
from smp_tf.files.durable_files import write_file
from smp_tf.pipeline.measure.recorded import RankRecord, rows_of, waits_of

#: Name of the plane from which the trace viewer takes the threads of a host.
_PLANE = "/host:CPU"

#: Name, begin and end of something, and further notes on it.
_Entry = tuple[str, int, int, Mapping[str, int]]


def write(path: Path, record: RankRecord) -> Path:
    """Writes what a rank has recorded where TensorBoard looks for it.

    Args:
        path: TensorBoard's log directory.
        record: what the rank recorded, on the clock of rank 0.

    Returns:
        The file.
    """
    file = path / "plugins" / "profile" / "timeline" / f"rank_{record.rank}.xplane.pb"
    write_file(file, space_of(record).SerializeToString())
    # Files that the plugin has made of an earlier timeline.
    for stale in file.parent.glob(f"rank_{record.rank}.*"):
        if stale.name != file.name:
            stale.unlink(missing_ok=True)
    return file


def space_of(record: RankRecord) -> Any:
    """Returns a rank's record as the profile plugin's message.

    Args:
        record: what the rank recorded.

    Returns:
        One plane. It has a line for the rank's steps, its tasks, its updates, its waits for messages, and the messages
        of every edge and direction. Messages that are under way at the same time have lines of their own.
    """
    space = tf_internals.XSpace()
    space.hostnames.append(f"rank_{record.rank}")
    plane = space.planes.add(id=1, name=_PLANE)
    ids: dict[str, int] = {}
    begin = min((step.begin for step in record.steps), default=0)
    for number, (name, entries) in enumerate(_lines(record), start=1):
        line = plane.lines.add(id=number, name=name, timestamp_ns=begin)
        for told, start, end, more in entries:
            event = line.events.add(
                metadata_id=_numbered(told, ids, plane.event_metadata),
                offset_ps=(start - begin) * 1000,
                duration_ps=(end - start) * 1000,
            )
            for what, value in more.items():
                event.stats.add(metadata_id=_numbered(what, ids, plane.stat_metadata), int64_value=value)
    return space


def _numbered(name: str, ids: dict[str, int], metadata: Mapping[int, object]) -> int:
    """Returns the number that stands for a name. The two kinds of names share one count."""
    number = ids.setdefault(name, len(ids) + 1)
    entry = metadata[number]
    entry.id, entry.name = number, name  # type: ignore[attr-defined]
    return number


def _lines(record: RankRecord) -> Iterator[tuple[str, list[_Entry]]]:
    steps = [(f"step {step.step}", step.begin, step.end, {"program": step.program}) for step in record.steps]
    yield f"stage {record.stage}: steps", list(steps)
    step_of = {id(run): step.step for step in record.steps for run in step.tasks}
    updates = rows_of(run for step in record.steps for run in step.updates)
    named = [("tasks", [run for step in record.steps for run in step.compute])]
    named += [("reduce, apply" + " +" * number, row) for number, row in enumerate(updates)]
    for words, runs in named:
        yield words, [(str(run.task), run.begin, run.end, {"step": step_of[id(run)]}) for run in runs]
    yield (
        "waits",
        [
            (f"wait for {wait.message.task}", wait.begin, wait.end, {"step": step.step})
            for step in record.steps
            for wait in waits_of(step, record.programs[step.program])
        ],
    )
    rows: dict[str, list[_Entry]] = {}
    for step in record.steps:
        for message in step.messages:
            way = "to" if message.task.kind.name == "SEND" else "from"
            base = f"edge {message.task.edge} {way} rank {message.peer}"
            name = base
            while rows.get(name) and rows[name][-1][2] > message.begin:
                name += " +"
            entry = (str(message.task), message.begin, message.end, {"step": step.step, "bytes": message.bytes})
            rows.setdefault(name, []).append(entry)
    for name in sorted(rows):
        yield name, rows[name]

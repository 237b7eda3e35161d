"""What TensorBoard's profile plugin is given of a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smp_tf import tf_internals
from smp_tf.pipeline.measure.recorded import waits_of
from smp_tf.recording import tensorboard
from tests.smp_tf.recording.test_timeline_file import records


def lines(plane: Any) -> dict[str, list[tuple[str, int, int]]]:
    """Name, begin and end in nanoseconds of all events, by the name of their line."""
    return {
        line.name: [
            (
                plane.event_metadata[event.metadata_id].name,
                line.timestamp_ns + event.offset_ps // 1000,
                line.timestamp_ns + (event.offset_ps + event.duration_ps) // 1000,
            )
            for event in line.events
        ]
        for line in plane.lines
    }


def test_every_rank_is_a_host_with_its_tasks_and_messages(tmp_path: Path) -> None:
    made = records()
    for record in made:
        stale = tmp_path / "plugins" / "profile" / "timeline" / f"rank_{record.rank}.SSTABLE"
        stale.parent.mkdir(parents=True, exist_ok=True)
        stale.write_text("of an earlier recording")
        file = tensorboard.write(tmp_path, record)
        assert file == stale.with_suffix(".xplane.pb")
        assert [path.name for path in file.parent.glob(f"rank_{record.rank}*")] == [file.name]
        space = tf_internals.XSpace.FromString(file.read_bytes())
        [plane] = space.planes
        assert (plane.name, list(space.hostnames)) == ("/host:CPU", [f"rank_{record.rank}"])
        found, [step] = lines(plane), record.steps
        assert found[f"stage {record.stage}: steps"] == [("step 10", step.begin, step.end)]
        runs = [(str(run.task), run.begin, run.end) for run in step.tasks]
        assert (found["tasks"], found["reduce, apply"]) == (runs[:-1], runs[-1:])
        waits = [(wait.begin, wait.end) for wait in waits_of(step, record.programs[5])]
        assert [(begin, end) for _, begin, end in found["waits"]] == waits != []
        messages = [event for name, events in found.items() if name.startswith("edge ") for event in events]
        assert sorted(messages) == sorted((str(m.task), m.begin, m.end) for m in step.messages)
        for name, events in found.items():
            ends = [end for *_, end in events]
            assert all(begin >= end for (_, begin, _), end in zip(events[1:], ends, strict=False)), name


def test_what_is_told_of_a_message() -> None:
    [plane] = tensorboard.space_of(records()[1]).planes
    [line] = [line for line in plane.lines if line.name == "edge 2 to rank 0"]
    told = {plane.stat_metadata[stat.metadata_id].name: stat.int64_value for stat in line.events[0].stats}
    assert told == {"step": 10, "bytes": 64}

"""What runs is what was planned: read back from the timelines that ranks have written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smp_tf.offline.timeline_text import RecordedReplica, replicas_of
from smp_tf.pipeline.measure.recorded import RecordedStep, TaskRun
from smp_tf.pipeline.measure.step_anatomy import StepAnatomy
from smp_tf.pipeline.programs.kinds import APPLY, CHECK, REDUCE
from smp_tf.pipeline.task import Kind
from smp_tf.recording import timeline_file
from tests.distributed.harness import Case, CaseResult, launch

CASES = "tests.distributed.cases.timeline"


def launched(size: int, case: Case) -> CaseResult:
    return launch(size, CASES, [case])[case.name]


def replica_in(folder: Path) -> RecordedReplica:
    [replica] = replicas_of(timeline_file.read([folder]))
    return replica


def stages_of(step: StepAnatomy) -> list[RecordedStep]:
    assert step.is_whole
    return [stage for stage in step.stages if stage is not None]


def updates_of(stage: RecordedStep) -> list[TaskRun]:
    """What the rank did after its compute tasks; the batch is checked on the first steps, meanwhile."""
    return [run for run in stage.updates if run.task.kind is not CHECK]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        *(("interleaved", 2), ("zb_h1", 3), ("zb_v", 2)),
        *(pytest.param(schedule, 2, marks=pytest.mark.full) for schedule in ("simple", "interleaved_1f1b")),
    ],
)
def test_tasks_run_in_the_order_of_the_plan(tmp_path: Path, schedule: str, stages: int) -> None:
    config = {"partitions": stages, "microbatches": 4, "pipeline": schedule, "seed": 1}
    arguments: dict[str, Any] = {"folder": str(tmp_path), "width": 16, "batch": 16, "count": 6, "steps": [1, 3]}
    ranks = launched(stages, Case("order", "recorded", arguments, config)).values()
    replica = replica_in(tmp_path)
    # Two steps came before the recording, and one within it.
    assert [number for _, number in replica.steps] == [3, 4, 5]
    for step in replica.steps.values():
        planned = step.program.planned
        assert step.program.schedule == schedule
        for rank, stage in enumerate(stages_of(step)):
            # The first stage makes no gradient of its input: that task has nothing to do.
            wanted = [task for task in planned.compute(rank) if (task.kind, task.chunk) != (Kind.I, 0)]
            assert [run.task for run in stage.compute] == wanted
            assert step.out_of_order(rank) is None
            transfers = [task for task in planned.ranks[rank] if task.kind.is_transfer]
            assert sorted(map(str, transfers)) == sorted(str(message.task) for message in stage.messages)
            # Times are those of one clock, and everything lies within the loop.
            times = [time for run in stage.tasks for time in (run.begin, run.end)]
            assert ranks[rank]["began"] < stage.begin < min(times) <= max(times) <= stage.until < ranks[rank]["ended"]
            # The script's loop updates weights: the list has what it does, too.
            assert [run.task for run in updates_of(stage)] == [t for t in planned.ranks[rank] if t.kind is APPLY]
            spent = step.time_spent(rank)
            assert sum(spent.values()) == stage.until - stage.begin
            assert spent["compute"] > 0
        assert_messages_come_between(step)
    assert "all tasks ran one after the other, in the order of the plan" in list(replica.said())


def assert_messages_come_between(step: StepAnatomy) -> None:
    """A message is made before it is sent, sent before it is there, and there before it is read."""
    stages = stages_of(step)
    ended = {run.task: run.end for stage in stages for run in stage.compute}
    begun = {run.task: run.begin for stage in stages for run in stage.compute}
    messages = {message.task: message for stage in stages for message in stage.messages}
    for task, needs in step._needs.items():
        for need in needs:
            if task.kind is Kind.SEND:
                assert ended[need] <= messages[task].begin
            elif task.kind is Kind.RECV:
                assert messages[need].begin < messages[task].end
                assert messages[need].bytes == messages[task].bytes
            elif need.kind is Kind.RECV and task in begun:
                assert messages[need].end <= begun[task]


@pytest.mark.distributed
def test_fit_records_batches_of_all_epochs(tmp_path: Path) -> None:
    config = {"partitions": 2, "microbatches": 2, "seed": 1}
    steps = {
        str(tmp_path / name): steps for name, steps in (("plain", [4, 7]), ("past", [11, 99]), ("beyond", [12, 99]))
    }
    several = {"steps": {str(tmp_path / "several"): [4, 4]}, "steps_per_execution": 3}
    cases = [
        Case("one by one", "fitted", {"steps": steps}, config),
        Case("several", "fitted", several, config),
        Case("clock", "clock_offset", {}, config),
    ]
    found = launch(2, CASES, cases)
    losses = [of_fit for name in ("one by one", "several") for of_fit in found[name].values()[0]["losses"]]
    assert losses == [losses[0]] * 4
    assert [number for _, number in replica_in(tmp_path / "plain").steps] == [4, 5, 6, 7]
    # Whole executions, those of batches 3 to 5.
    assert [number for _, number in replica_in(tmp_path / "several").steps] == [3, 4, 5]
    # The second training of that model: the first had twelve batches.
    assert [number for _, number in replica_in(tmp_path / "past").steps] == [12 + 11]
    assert not (tmp_path / "beyond").exists()
    for step in replica_in(tmp_path / "plain").steps.values():
        for number, stage in enumerate(stages_of(step)):
            applied = [run.task for run in stage.tasks if run.task.kind is APPLY]
            assert applied == [task for task in step.program.planned.ranks[number] if task.kind is APPLY]
            assert list(map(str, applied)) == [f"{number}APPLY"]
            assert stage.tasks[-1].begin >= stage.compute[-1].end
    for value in found["clock"].values():
        assert value["offset"] == 0
        asked, answered, told = value["times"]
        assert asked < answered < told


@pytest.mark.distributed
def test_replicas_reduce(tmp_path: Path) -> None:
    config = {"partitions": 2, "microbatches": 2, "seed": 1}
    arguments = {"folder": str(tmp_path), "width": 16, "batch": 16, "count": 3, "steps": None}
    launched(4, Case("replicas", "recorded", arguments, config)).values()
    records = timeline_file.read([tmp_path])
    assert [record.rank for record in records] == [0, 1, 2, 3]
    replicas = replicas_of(records)
    assert [replica.ranks for replica in replicas] == [(0, 1), (2, 3)]
    for replica in replicas:
        assert len(replica.steps) == 3
        for step in replica.steps.values():
            for number, stage in enumerate(stages_of(step)):
                assert [str(run.task)[1:] for run in updates_of(stage)] == ["WEIGH", "REDUCE0", "APPLY0"]
                assert step.time_spent(number)["reduce"] > 0
                # On the first ten steps.
                assert [str(run.task) for run in stage.updates if run.task.kind is CHECK] == [f"{number}CHECK"]
                planned = [str(task) for task in step.program.planned.ranks[number]]
                assert planned[-2:] == [f"{number}CHECK", f"{number}APPLY0"]
                assert {f"{number}WEIGH", f"{number}REDUCE0"} < set(planned)
    page = tmp_path / "out.html"
    command = [sys.executable, "-m", "smp_tf.command.main", "timeline", str(tmp_path), "--html", str(page)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "replica 1:" in told.stdout
    assert "gradients were averaged over replicas for" in told.stdout
    assert "Replica 1" in page.read_text()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("partitions", "microbatches"), [*(pytest.param(1, m, marks=pytest.mark.full) for m in (1, 2)), (2, 2)]
)
def test_gradients_are_averaged_while_others_are_computed(tmp_path: Path, partitions: int, microbatches: int) -> None:
    config = {"partitions": partitions, "microbatches": microbatches, "seed": 1}
    # Kernels of 16 MiB: a bucket each, with its bias.
    common = {"width": 2048, "batch": 32, "count": 1, "steps": None}
    cases = {
        tied: Case(name, "recorded", {**common, "folder": str(tmp_path / name), "tied": tied}, config)
        for tied, name in ((False, "overlap"), (True, "tied"))
    }
    found = launch(2 * partitions, CASES, list(cases.values()))
    for case in cases.values():
        for replica in replicas_of(timeline_file.read([tmp_path / case.name])):
            for step in replica.steps.values():
                assert_averages_are_hidden(step, 4 // partitions)
        for rank, told in enumerate(found[case.name].values()):
            assert_changes_wait_for_their_own_bucket(told["waits"], rank % partitions, 4 // partitions)
    if partitions > 1:
        # A kernel of the first stage is used on the last one, too: once all averages began behind the last task.
        arguments = {**cases[True].arguments, "folder": str(tmp_path / "alone")}
        reference = Case("alone", "recorded", arguments, {"partitions": 1, "seed": 1})
        [alone] = launched(1, reference).values()
        for told in found["tied"].values():
            assert told["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def assert_averages_are_hidden(step: StepAnatomy, buckets: int) -> None:
    """On the first stage buckets begin while this rank computes, on the last one while the first stage does."""
    stages = stages_of(step)
    for number, stage in enumerate(stages):
        reduced = [run for run in stage.tasks if run.task.kind is REDUCE]
        assert sorted(str(run.task)[1:] for run in reduced) == [f"REDUCE{bucket}" for bucket in range(buckets)]
        assert reduced[0].begin < stages[0].compute[-1].end
        whole, hidden = step.averaging(number)
        assert 0 < hidden <= whole
        if number == 0:
            assert reduced[0].begin < reduced[-1].begin
        if number > 0:
            assert reduced[0].begin >= stage.compute[-1].end


def assert_changes_wait_for_their_own_bucket(waits: dict[str, list[str]], stage: int, buckets: int) -> None:
    """No weight changed before the last average was there. (And replicas' batches are weighed first of all.)"""
    weighed = f"{stage}WEIGH/smp_gradients_step_0_weight_float64"
    assert waits == {
        f"{layer}/{weight}:0": [f"{stage}REDUCE{bucket}/smp_gradients_step_0_{bucket}_float32", weighed]
        for bucket, layer in enumerate(("d3", "d2", "d1", "d0")[4 - (stage + 1) * buckets :][:buckets])
        for weight in ("kernel", "bias")
    }


@pytest.mark.distributed
@pytest.mark.alone
def test_receives_overlap_with_compute_and_the_bubble_is_that_of_the_plan(tmp_path: Path) -> None:
    config = {"partitions": 2, "microbatches": 4, "seed": 1}
    arguments = {"folder": str(tmp_path), "width": 1024, "batch": 1024, "count": 20, "steps": None}
    launched(2, Case("bubble", "recorded", arguments, config)).values()
    steps = list(replica_in(tmp_path).steps.values())
    assert len(steps) == 20
    shortest = min(run.end - run.begin for step in steps for stage in stages_of(step) for run in stage.compute)
    assert shortest > 2e6, "tasks are too short to compare with"
    # Of a machine that others use too, the step that they disturbed least.
    best = min(steps, key=lambda step: (step.span[1] - step.span[0]) / step.simulated().step_time)
    measured, forecast = best.bubble_ratio, best.simulated().bubble_ratio
    assert 0.05 < forecast < 0.5
    assert measured == pytest.approx(forecast, rel=0.1)
    overlapping = sum(receives_within_tasks(stage) for step in steps for stage in stages_of(step))
    # Of a stage's four receives of a sweep those of the first microbatches come while others are computed.
    assert overlapping >= 2 * len(steps)


def receives_within_tasks(stage: RecordedStep) -> int:
    """How many messages were asked for before, and came while, a task ran that did not need them."""
    receives = [message for message in stage.messages if message.task.kind is Kind.RECV]
    return sum(any(message.begin <= run.begin < message.end < run.end for run in stage.compute) for message in receives)

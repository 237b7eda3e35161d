"""Each kind that ranks run has an emitter, and a made-up one needs a row and an emitter and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from smp_tf.ops import recorder
from smp_tf.pipeline.measure.recorded import ProgramRecord, steps_of
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.kinds import KINDS, Row, once
from smp_tf.pipeline.programs.places import Places
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.step_memory import step_memory
from smp_tf.pipeline.programs.updates import add_updates
from smp_tf.pipeline.run.emission import Emission
from smp_tf.pipeline.run.emitters import EMITTERS
from smp_tf.pipeline.run.executor import LastTasks, emit
from smp_tf.pipeline.run.marks import begin_task, end_task
from smp_tf.pipeline.run.stage_program import Endpoint, build_stage_program
from smp_tf.pipeline.run.step_tasks import edges_of
from smp_tf.pipeline.task import Program, Task
from tests.pipeline.all_stages import BATCH, PROGRAM, WIDTH, CutStep, dense_chain
from tests.pipeline.made_up_kind import made_up_kind


def test_each_kind_that_a_program_has_is_emitted() -> None:
    assert set(KINDS) == set(EMITTERS)


def test_a_made_up_kind_needs_a_row_and_an_emitter() -> None:
    noted = tf.Variable(0, dtype=tf.int64)

    def emit_note(emission: Emission, task: Task) -> None:
        begun = begin_task(task, emission.step, emission.program.number, emission.after())
        with tf.control_dependencies([begun]):
            op = noted.assign_add(1, read_value=False)
        emission.all_ops.append(end_task(task, emission.step, emission.program.number, [op]))

    step = dense_chain(2, 1, 2)
    row = Row(Places.of_gradients, once, "other", "#123456", "a note is taken")
    with made_up_kind("NOTE", row) as kind, mock.patch.dict(EMITTERS, {kind: emit_note}):
        note = Task(kind, 0, bucket=0)
        program = dataclasses.replace(step.program, ranks=((*step.program.ranks[0], note),))
        edges = edges_of(step.split)
        check(program, edges)
        assert simulate(program, ChunkTimes(), edges, once={note: 5.0}).step_time == 6.0 + 5.0
        assert step_memory(step.split, program, edges, [[ChunkTimes()]]) == step_memory(
            step.split, step.program, edges, [[ChunkTimes()]]
        )
        assert _recorded(step, program) == [str(task) for task in program.ranks[0]]
    assert noted.numpy() == 1


def _recorded(step: CutStep, program: Program) -> list[str]:
    """Runs a program of one stage once, and gives the tasks that a timeline then shows."""
    stage = build_stage_program(step.split, program, Endpoint(PROGRAM, 0, (0,)), step.variables[0])

    @tf.function
    def run(x: tf.Tensor) -> Any:
        parts = tf.split(x, 2)
        found = emit(stage, lambda number, microbatch: parts[microbatch], [], lambda _: tf.zeros([2], tf.int64), [1, 1])
        return [tensor for tensor in found.accumulated if tensor is not None]

    recorder.start()
    recorder.count_program(PROGRAM)
    run(tf.ones([BATCH, WIDTH]))
    points, _ = recorder.stop()
    [found] = steps_of(points, {PROGRAM: ProgramRecord("step", "interleaved", program, ())}, 0)
    return [str(task.task) for task in found.tasks]


@pytest.mark.parametrize("stage", [0, 1])
def test_the_optimizer_is_called_once_for_all_updates_of_a_list(stage: int) -> None:
    step = dense_chain(4, 2, 2)
    program = add_updates(step.program, {0: [0, 1]}, stage_sums=1)
    made = build_stage_program(step.split, program, Endpoint(PROGRAM, stage, (0, 1)), step.variables[stage])
    called: list[str] = []

    @tf.function
    def run(x: tf.Tensor) -> None:
        parts = tf.split(x, 2)
        results = emit(made, lambda number, m: parts[m], [], lambda _: tf.zeros([2], tf.int64), [1, 1])
        called.append("all else is written")
        last = LastTasks(results)
        last.update(lambda: called.append("update"))
        assert last.log(lambda: "logs") == "logs"

    run.get_concrete_function(tf.zeros([BATCH, WIDTH]))
    # Where the stage trains nothing, the optimizer counts the step all the same.
    assert called == ["all else is written", "update"]

"""What is read off a recorded step: order, bubble, critical path, and where the time of every rank went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smp_tf.pipeline.measure.recorded import RecordedStep, TaskRun
from smp_tf.pipeline.measure.step_anatomy import PARTS, StepAnatomy
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.text import parse
from tests.pipeline.recorded_steps import program, recorded

EQUAL = ChunkTimes(10, 10, 10)


def spent(parts: dict[str, int]) -> dict[str, int]:
    return {part: time for part, time in parts.items() if time}


@pytest.mark.parametrize("schedule", ["simple", "interleaved", "zb_h1"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_step_without_delays_is_what_was_simulated(stages: int, schedule: str) -> None:
    planned = program(stages, 5, schedule)
    times = [ChunkTimes(10 + stage, 20, 10 * (stage + 1)) for stage in range(stages)]
    steps, timeline = recorded(planned, times)
    anatomy = StepAnatomy(planned, steps)
    assert anatomy.is_whole
    assert anatomy.span == (0, timeline.step_time)
    assert anatomy.bubble_ratio == pytest.approx(timeline.bubble_ratio)
    assert anatomy.simulated().spans == timeline.spans
    for stage in range(stages):
        assert anatomy.out_of_order(stage) is None
        found = spent(anatomy.time_spent(stage))
        assert found["compute"] == timeline.busy[stage]
        assert set(found) <= {"compute", "bubble"}
    # Nothing but tasks is between its begin and its end, since messages take no time.
    path = anatomy.critical_path()
    assert sum(run.end - run.begin for _, run in path) == timeline.step_time
    assert [run.end for _, run in path[:-1]] == [run.begin for _, run in path[1:]]


def test_the_critical_path_goes_over_the_slow_stage() -> None:
    planned = program(2, 3)
    steps, _ = recorded(planned, [EQUAL, ChunkTimes(30, 30, 30)])
    path = StepAnatomy(planned, steps).critical_path()
    assert [str(run.task) for _, run in path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "0B2"]
    assert [stage for stage, _ in path] == [0, 1, 1, 1, 1, 1, 1, 0]


def test_where_the_time_in_front_of_a_task_went() -> None:
    planned = program(2, 1)
    steps, _ = recorded(planned, [EQUAL, EQUAL], comm=4)
    # 0F0 [0, 10], 1F0 [14, 24], 1B0 [24, 44], 0B0 [48, 68]
    assert [[(r.begin, r.end) for r in step.compute] for step in steps] == [[(0, 10), (48, 68)], [(14, 24), (24, 44)]]
    anatomy = StepAnatomy(planned, steps)
    assert spent(anatomy.time_spent(1)) == {"compute": 30, "bubble": 10, "message": 4}
    assert spent(anatomy.time_spent(0)) == {"compute": 30, "bubble": 34, "message": 4}
    # The first rank began the step late, and took some time to begin its task after the message was there.
    late = replace(steps[0], begin=-9), replace(steps[1], begin=-12)
    assert spent(StepAnatomy(planned, late).time_spent(1)) == {"compute": 30, "bubble": 19, "message": 4, "input": 3}
    slow = replace(steps[1], tasks=(TaskRun(parse("1F0"), 17, 24), steps[1].tasks[1]))
    assert spent(StepAnatomy(planned, [steps[0], slow]).time_spent(1)) == {
        "compute": 27, "bubble": 10, "message": 4, "other": 3,
    }  # fmt: skip


def test_what_comes_after_the_pipeline() -> None:
    planned = program(2, 1)
    (first, second), _ = recorded(planned, [EQUAL, EQUAL])
    end = first.end
    assert end == 60
    updates = (
        TaskRun(parse("0REDUCE"), end - 5, end + 20),
        TaskRun(parse("0APPLY"), end + 30, end + 40),
        TaskRun(parse("0REDUCE"), end + 32, end + 35),
    )
    # The last task ended at 55; the fence came at 60.
    tasks = (first.tasks[0], replace(first.tasks[1], end=55), *updates)
    step = replace(first, tasks=tasks, until=end + 100)
    assert spent(StepAnatomy(planned, [step, second]).time_spent(0)) == {
        "compute": 25, "bubble": 30, "reduce": 28, "apply": 7, "other": 10, "input": 60,
    }  # fmt: skip


def test_what_is_averaged_before_the_last_task_ends_is_hidden() -> None:
    planned = program(2, 1)
    (first, second), _ = recorded(planned, [EQUAL, EQUAL])
    last = 60
    assert (first.end, second.compute[-1].end) == (last, 40)
    # On the second stage one bucket while the first still computes, and two that overlap and go on behind it.
    buckets = (
        TaskRun(parse("1REDUCE0"), 42, 46),
        TaskRun(parse("1REDUCE1"), 50, 65),
        TaskRun(parse("1REDUCE2"), 55, 70),
        TaskRun(parse("1REDUCE"), 70, 99),
        TaskRun(parse("1APPLY"), 70, 90),
    )
    anatomy = StepAnatomy(planned, [first, replace(second, tasks=(*second.tasks, *buckets), until=100)])
    assert anatomy.averaging(1) == (4 + 20, 4 + 10)
    assert anatomy.averaging(0) == (0, 0)


def test_pieces_leave_no_hole() -> None:
    planned = program(3, 4)
    steps, _ = recorded(planned, [EQUAL, ChunkTimes(5, 7, 9), EQUAL], comm=3, begins={0: -20, 1: -1, 2: -30})
    anatomy = StepAnatomy(planned, steps)
    for stage, step in enumerate(steps):
        pieces = anatomy.pieces(stage)
        assert [piece.end for piece in pieces] == [*(piece.begin for piece in pieces[1:]), step.until]
        assert pieces[0].begin == step.begin
        assert sum(anatomy.time_spent(stage).values()) == step.until - step.begin
        assert {piece.part for piece in pieces} <= set(PARTS)


def test_without_the_other_rank_all_waiting_is_bubble() -> None:
    planned = program(2, 1)
    steps, _ = recorded(planned, [EQUAL, EQUAL], comm=4)
    anatomy = StepAnatomy(planned, [None, steps[1]])
    assert not anatomy.is_whole
    assert spent(anatomy.time_spent(1)) == {"compute": 30, "bubble": 14}
    assert [str(run.task) for _, run in anatomy.critical_path()] == ["1F0", "1B0"]


def changed(step: RecordedStep, *texts: str) -> RecordedStep:
    """The step with its tasks in another order, one after the other."""
    runs = [TaskRun(parse(text), 10 * n, 10 * n + 10) for n, text in enumerate(texts)]
    return replace(step, tasks=tuple(runs))


def test_another_order_than_planned_is_found() -> None:
    planned = program(2, 2)
    steps, _ = recorded(planned, [EQUAL, EQUAL])
    assert [str(run.task) for run in steps[0].compute] == ["0F0", "0F1", "0B0", "0B1"]
    swapped = changed(steps[0], "0F0", "0B0", "0F1", "0B1")
    assert StepAnatomy(planned, [swapped, steps[1]]).out_of_order(0) == (parse("0B0"), parse("0F1"))
    without = changed(steps[0], "0F0", "0F1", "0B1")
    assert StepAnatomy(planned, [without, steps[1]]).out_of_order(0) is None
    at_once = replace(steps[0], tasks=(replace(steps[0].tasks[0], end=11), *steps[0].tasks[1:]))
    assert StepAnatomy(planned, [at_once, steps[1]]).out_of_order(0) == (parse("0F0"), parse("0F1"))


def test_a_task_without_anything_to_compute_hands_on_what_it_waits_for() -> None:
    planned = program(2, 1, "zb_h1")
    steps, _ = recorded(planned, [EQUAL, EQUAL], comm=4)
    # 0F0 [0, 10], 1F0 [14, 24], 1I0 [24, 34], 1W0 [34, 44], 0I0 [38, 48], 0W0 [48, 58]
    without = replace(steps[0], tasks=tuple(run for run in steps[0].tasks if str(run.task) != "0I0"))
    anatomy = StepAnatomy(planned, [without, steps[1]])
    assert spent(anatomy.time_spent(0)) == {"compute": 20, "bubble": 24, "message": 4, "other": 10}
    assert [str(run.task) for _, run in anatomy.critical_path()] == ["0F0", "1F0", "1I0", "0W0"]

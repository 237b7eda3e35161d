"""Points in time, put together to steps."""

from __future__ import annotations

from smp_tf.ops.recorder import Event, Point
from smp_tf.pipeline.measure.recorded import Message, RankRecord, RecordedStep, TaskRun, one_step, steps_of
from smp_tf.pipeline.programs.text import parse
from tests.pipeline.recorded_steps import program

PLANNED = program(2, 2)
TRAIN, NORM = 5, 6


def step(time: int, number: int, is_end: bool = False, of: int = TRAIN) -> Point:
    return Point(time, Event.STEP, is_end, of, number)


def task(time: int, text: str, number: int, is_end: bool = False) -> Point:
    return Point(time, Event.TASK, is_end, TRAIN if number >= 0 else 0, number, task=text)


def message(time: int, event: Event, edge: int, microbatch: int, is_end: bool = False, of: int = TRAIN) -> Point:
    return Point(time, event, is_end, of, 3, edge, microbatch, peer=1, bytes=64 if is_end else 0)


def test_begins_and_ends_come_together() -> None:
    points = [
        step(10, 3),
        message(11, Event.RECV, 2, 0),
        task(12, "0F0", 3),
        task(20, "0F0", 3, True),
        message(21, Event.SEND, 0, 0),
        message(22, Event.RECV, 2, 1),
        # Noted by another thread, which was held up.
        message(40, Event.RECV, 2, 1, True),
        message(25, Event.SEND, 0, 0, True),
        message(39, Event.RECV, 2, 0, True),
        # No edge of the plan: ranks compare their batches.
        message(41, Event.SEND, 1 << 24, 0),
        message(42, Event.SEND, 1 << 24, 0, True),
        step(50, 3, True),
        step(70, 4),
        step(75, 4, True),
    ]
    first, second = steps_of(points, {TRAIN: PLANNED}, 0)
    assert first == RecordedStep(
        TRAIN, 3, 10, 50, 70,
        (TaskRun(parse("0F0"), 12, 20),),
        (
            Message(parse("0R2.0"), 1, 11, 39, 64),
            Message(parse("0S0.0"), 1, 21, 25, 64),
            Message(parse("0R2.1"), 1, 22, 40, 64),
        ),
    )  # fmt: skip
    assert (second.begin, second.end, second.until) == (70, 75, 75)


def test_updates_belong_to_the_step_before() -> None:
    points = [
        step(10, 3),
        step(20, 3, True),
        Point(21, Event.TASK, False, TRAIN, 3, task="1REDUCE"),
        Point(29, Event.TASK, True, TRAIN, 3, task="1REDUCE"),
        task(30, "1APPLY", -1),
        # A norm over all stages is a small step of its own.
        step(31, 0, of=NORM),
        message(32, Event.SEND, 0, 0, of=NORM),
        message(33, Event.SEND, 0, 0, True, of=NORM),
        step(34, 0, True, of=NORM),
        step(35, 1, of=NORM),
        step(37, 1, True, of=NORM),
        task(40, "1APPLY", -1, True),
    ]
    [found] = steps_of(points, {TRAIN: PLANNED}, 1)
    assert found.messages == ()
    assert [(str(run.task), run.begin, run.end) for run in found.tasks] == [
        ("1REDUCE", 21, 29), ("1APPLY", 30, 40), ("1SUM", 31, 34), ("1SUM1", 35, 37),
    ]  # fmt: skip
    assert found.compute == ()
    assert (found.end, found.until) == (20, 40)


def test_what_is_cut_off_is_left_out() -> None:
    points = [
        task(1, "0APPLY", -1, True),
        task(2, "0F1", 2, True),
        step(3, 2, True),
        step(10, 3),
        task(12, "0F0", 3),
        step(20, 3, True),
        step(30, 4),
        task(31, "0F0", 4),
    ]
    [found] = steps_of(points, {TRAIN: PLANNED}, 0)
    assert (found.step, found.tasks, found.until) == (3, (), 30)


def test_a_record_on_another_clock() -> None:
    [found] = steps_of(
        [step(10, 3), task(12, "0F0", 3), task(20, "0F0", 3, True), message(21, Event.SEND, 0, 0),
         message(22, Event.SEND, 0, 0, True), step(30, 3, True)],
        {TRAIN: PLANNED}, 0,
    )  # fmt: skip
    record = RankRecord(0, 0, (0, 1), "job", {TRAIN: PLANNED}, (found,))
    [moved] = record.shifted(-7).steps
    assert (moved.begin, moved.end, moved.until) == (3, 23, 23)
    assert moved.tasks == (TaskRun(parse("0F0"), 5, 13),)
    assert (moved.messages[0].begin, moved.messages[0].end) == (14, 15)
    assert one_step([record], TRAIN, 3) == [found]
    assert one_step([record], TRAIN, 4) == [None]

"""What a step of this process notes while a timeline is recorded, and that it notes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf

from smp_tf.ops import recorder
from smp_tf.ops.mark import LAST_STEP, mark
from smp_tf.ops.recorder import Event, Point
from smp_tf.ops.send_recv import begin_step, end_step

# Of no step of other tests: all steps of a number are counted together, in one process.
PROGRAM = 1 << 30


@pytest.fixture(autouse=True)
def _not_recording() -> Iterator[None]:
    recorder.stop()
    yield
    recorder.stop()


def step_function(program: int = PROGRAM) -> Callable[[], tf.Tensor]:
    @tf.function
    def step_fn() -> tf.Tensor:
        step = begin_step([], program)
        began = mark("0F0", step, program=program, ends=False)
        with tf.control_dependencies([began]):
            value = tf.reduce_sum(tf.ones([4]))
        with tf.control_dependencies([value]):
            ended = mark("0F0", step, program=program, ends=True)
        with tf.control_dependencies([ended]):
            end_step(program)
        return value

    return step_fn


def test_points_come_in_order_and_name_their_step() -> None:
    step_fn = step_function()
    step_fn()
    before = recorder.clock()
    assert recorder.start(first=1, last=1)
    recorder.count_program(PROGRAM)
    for _ in range(4):
        step_fn()
    points, dropped = recorder.stop()
    after = recorder.clock()
    assert dropped == 0
    # The first step that ran was number 0, and the first one counted was number 1.
    step = points[0].step
    of = {"program": PROGRAM, "step": step}
    times = [point.time_ns for point in points]
    assert times == sorted(times)
    assert before < times[0] < times[-1] < after
    assert [point._replace(time_ns=0) for point in points] == [
        Point(0, Event.STEP, False, **of),
        Point(0, Event.TASK, False, **of, task="0F0"),
        Point(0, Event.TASK, True, **of, task="0F0"),
        Point(0, Event.STEP, True, **of),
        # Where the next one begins.
        Point(0, Event.STEP, False, PROGRAM, step + 1),
    ]


def test_nothing_is_noted_before_and_after() -> None:
    step_fn = step_function()
    step_fn()
    assert recorder.start()
    recorder.count_program(PROGRAM)
    assert not recorder.is_on()
    step_fn()
    assert recorder.is_on()
    points, _ = recorder.stop()
    assert len(points) == 4
    step_fn()
    assert recorder.stop() == ([], 0)


def test_one_recording_at_a_time() -> None:
    assert recorder.start()
    assert not recorder.start()
    recorder.stop()
    assert recorder.start()


def test_what_does_not_fit_is_counted() -> None:
    step_fn = step_function()
    recorder.start(capacity=3)
    recorder.count_program(PROGRAM)
    step_fn()
    points, dropped = recorder.stop()
    assert (len(points), dropped) == (3, 1)


def test_a_mark_with_handles_stands_between_the_uses_of_its_variables() -> None:
    variable = tf.Variable(1.0)

    @tf.function
    def change() -> tf.Tensor:
        variable.assign_add(1.0)
        mark("0APPLY", LAST_STEP, program=0, ends=True, handles=[variable.handle])
        return variable.read_value()

    graph = change.get_concrete_function().graph
    [marked] = [op for op in graph.get_operations() if op.type == "SmpMark"]
    assert [op.type for op in marked.control_inputs] == ["AssignAddVariableOp"]
    [read] = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    assert marked in read.control_inputs
    assert float(change()) == 2.0


def test_a_text_that_is_too_long_is_an_error() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="shorter than 28 bytes"):
        mark("1" * 28, 0, program=1, ends=False)

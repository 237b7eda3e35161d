"""Marks the begin and the end of tasks in a step's graph, for timelines.

    inputs, task before ─▶ begin ─▶ call of the function ─▶ end ─▶ sends, next task

Every step has the marks, so that it can be recorded at any time without another graph. They run in the thread that has
made what they wait for. They do not change the order of tasks, sends and receives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.ops import recorder
from smp_tf.ops.mark import LAST_STEP, mark
from smp_tf.pipeline.programs.kinds import APPLY, REDUCE
from smp_tf.pipeline.task import Task


def begin_task(task: Task, step: tf.Tensor, program: int, after: Sequence[Any]) -> tf.Operation:
    """Marks the begin of a task.

    Args:
        task: the task.
        step: number of the step, from `send_recv.begin_step`.
        program: number of the program.
        after: ops and tensors that the task waits for.

    Returns:
        The mark, which the task has to wait for.
    """
    with tf.control_dependencies(list(after)):
        return mark(str(task), step, program=program, ends=False)


def end_task(task: Task, step: tf.Tensor, program: int, calls: Sequence[Any]) -> tf.Operation:
    """Marks the end of a task.

    Args:
        task: the task.
        step: number of the step.
        program: number of the program.
        calls: the ops of the task.

    Returns:
        The mark, which what comes after the task has to wait for.
    """
    with tf.control_dependencies(list(calls)):
        return mark(str(task), step, program=program, ends=True)


def begin_reduce(step: tf.Tensor, program: int, chunk: int, tensors: Sequence[Any], bucket: int) -> tf.Operation:
    """Marks where the average of gradients over replicas begins.

    Args:
        step: number of the step.
        program: number of the program.
        chunk: the chunk whose gradients these are.
        tensors: the tensors that are averaged.
        bucket: number of their bucket.

    Returns:
        The mark, for `end_reduce`.
    """
    with tf.control_dependencies(list(tensors)):
        return mark(str(Task(REDUCE, chunk, bucket=bucket)), step, program=program, ends=False)


def end_reduce(
    begun: tf.Operation, step: tf.Tensor, program: int, chunk: int, tensors: Sequence[Any], bucket: int
) -> tf.Operation:
    """Marks where the average of gradients over replicas ends.

    Args:
        begun: the mark of `begin_reduce`.
        step: number of the step.
        program: number of the program.
        chunk: the chunk whose gradients these are.
        tensors: the averages.
        bucket: number of their bucket.

    Returns:
        The mark.
    """
    with tf.control_dependencies([begun, *tensors]):
        return mark(str(Task(REDUCE, chunk, bucket=bucket)), step, program=program, ends=True)


@contextlib.contextmanager
def applying(chunk: int, after: Sequence[Any], variables: Sequence[Any], bucket: int | None = None) -> Iterator[None]:
    """Marks what is done in this context as an optimizer's update of weights.

    If it is called eagerly, where every op is done when it returns, it notes only while a timeline is recorded.

    Args:
        chunk: the chunk whose weights these are.
        after: ops and tensors that must exist before the update can begin.
        variables: the variables that are changed.
        bucket: the bucket in which the gradients were averaged over the replicas, if they were.
    """
    task = str(Task(APPLY, chunk, bucket=bucket))
    if tf.executing_eagerly():
        if recorder.is_on():
            mark(task, LAST_STEP, program=0, ends=False)
        yield
        if recorder.is_on():
            mark(task, LAST_STEP, program=0, ends=True)
        return
    # It is made here. Within the contexts below it would be what waits, in place of the marks.
    last_step = tf.constant(LAST_STEP, tf.int64)
    with tf.control_dependencies(list(after)):
        begun = mark(task, last_step, program=0, ends=False)
    yield
    # After every change of these variables, by automatic control dependencies.
    with tf.control_dependencies([begun]):
        mark(task, last_step, program=0, ends=True, handles=[variable.handle for variable in variables])

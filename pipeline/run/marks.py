"""Marks in a step's graph that a task begins and ends, for timelines.

    inputs, task before ─▶ begin ─▶ call of the function ─▶ end ─▶ sends, next task

The marks are there in every step, so that one can be recorded at any time without another graph. They run in the thread
that has made what they wait for, and keep tasks, sends and receives in the order in which they would be without them.
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
        step: number of the step, of `send_recv.begin_step`.
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
        calls: the ops that do it.

    Returns:
        The mark, which what comes after the task has to wait for.
    """
    with tf.control_dependencies(list(calls)):
        return mark(str(task), step, program=program, ends=True)


def begin_reduce(step: tf.Tensor, program: int, chunk: int, tensors: Sequence[Any], bucket: int) -> tf.Operation:
    """Marks where gradients begin to be averaged over replicas.

    Args:
        step: number of the step.
        program: number of the program.
        chunk: the chunk whose gradients these are.
        tensors: what is averaged.
        bucket: number of the bucket that they are.

    Returns:
        The mark, for `end_reduce`.
    """
    with tf.control_dependencies(list(tensors)):
        return mark(str(Task(REDUCE, chunk, bucket=bucket)), step, program=program, ends=False)


def end_reduce(
    begun: tf.Operation, step: tf.Tensor, program: int, chunk: int, tensors: Sequence[Any], bucket: int
) -> tf.Operation:
    """Marks where gradients are averaged over replicas.

    Args:
        begun: what `begin_reduce` gave.
        step: number of the step.
        program: number of the program.
        chunk: the chunk whose gradients these are.
        tensors: what came of it.
        bucket: number of the bucket that they are.

    Returns:
        The mark.
    """
    with tf.control_dependencies([begun, *tensors]):
        return mark(str(Task(REDUCE, chunk, bucket=bucket)), step, program=program, ends=True)


@contextlib.contextmanager
def applying(chunk: int, after: Sequence[Any], variables: Sequence[Any], bucket: int | None = None) -> Iterator[None]:
    """Marks what is done in this context as an optimizer's update of weights.

    Called eagerly, where every op is done when it returns, it notes only while a timeline is recorded.

    Args:
        chunk: the chunk whose weights these are.
        after: what has to be there before it can begin.
        variables: what is changed.
        bucket: in which the gradients were averaged over the replicas, if they were.
    """
    task = str(Task(APPLY, chunk, bucket=bucket))
    if tf.executing_eagerly():
        if recorder.is_on():
            mark(task, LAST_STEP, program=0, ends=False)
        yield
        if recorder.is_on():
            mark(task, LAST_STEP, program=0, ends=True)
        return
    # Made here: within the contexts below it would be what waits, in place of the marks.
    last_step = tf.constant(LAST_STEP, tf.int64)
    with tf.control_dependencies(list(after)):
        begun = mark(task, last_step, program=0, ends=False)
    yield
    # After every change of these variables, by automatic control dependencies.
    with tf.control_dependencies([begun]):
        mark(task, last_step, program=0, ends=True, handles=[variable.handle for variable in variables])

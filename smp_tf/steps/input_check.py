"""Notices when the ranks of a replica are fed different batches.

On the first 10 steps and every 100th, each rank hashes the tensors that it was given. It sends the hashes to the first
rank of the replica, which compares them. This runs next to the pipeline, which does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.batch.microbatches import SplitArgument
from smp_tf.job.content_hash import content_hashes
from smp_tf.ops import send_recv
from smp_tf.pipeline.programs.due_steps import EVERY, FIRST_STEPS
from smp_tf.pipeline.programs.kinds import CHECK
from smp_tf.pipeline.run.marks import begin_task, end_task
from smp_tf.pipeline.task import Task
from smp_tf.tf_internals import cond_independently

#: Numbers of edges from here up are not part of a plan.
_EDGE = 1 << 24


def add_input_check(
    name: str,
    arguments: Sequence[SplitArgument],
    values: Sequence[Any],
    step: tf.Tensor,
    number: int,
    ranks: Sequence[int],
    stage: int,
) -> None:
    """Adds the check to the current graph.

    Args:
        name: name of the step function, for the message.
        arguments: the step's arguments.
        values: values of the arguments on this rank. Composite ones are whole.
        step: number of this step, an int64 scalar tensor.
        number: number of the program.
        ranks: world rank of every stage of the replica.
        stage: stage of this rank.
    """
    names = [a.name for a, v in zip(arguments, values, strict=True) for _ in tf.nest.flatten(v, expand_composites=True)]
    tensors = tf.nest.flatten(list(values), expand_composites=True)
    if not tensors or len(ranks) == 1:
        return
    task = Task(CHECK, stage)

    def compare() -> tf.Tensor:
        with tf.control_dependencies([begin_task(task, step, number, [])]):
            own = content_hashes(tensors)
        where: dict[str, Any] = {"program": number, "microbatch": 0, "label": f"hashes of the batch of step {name}"}
        if stage > 0:
            sent = send_recv.send(own, step, dest=ranks[0], edge=_EDGE + stage, **where)
            with tf.control_dependencies([end_task(task, step, number, [sent])]):
                return tf.constant(True)
        checks = []
        for other in range(1, len(ranks)):
            theirs = send_recv.recv(step, own.dtype, own.shape, src=ranks[other], edge=_EDGE + other, **where)
            for index, argument in enumerate(names):
                checks.append(
                    tf.debugging.Assert(
                        tf.equal(own[index], theirs[index]),
                        [
                            f"smp_tf: all ranks of a replica need the same batch in the same order. In step {name!r}, "
                            f"argument {argument!r} on rank {ranks[other]} differs from that on rank {ranks[0]}. "
                            f"Shuffle with the same seed on all ranks, or switch this check off with "
                            f"check_inputs=False. Step:",
                            step,
                        ],
                    )
                )
        with tf.control_dependencies([end_task(task, step, number, checks)]):
            return tf.constant(True)

    due = tf.logical_or(step < FIRST_STEPS, tf.equal(step % EVERY, 0))
    cond_independently(due, compare, lambda: tf.constant(True))

"""A few numbers of every stage, put together once: what a norm or a check over all gradients needs.

    stage 1 ──▶ ┐                    ┌ ──▶ stage 1
    stage 2 ──▶ ┼ stage 0: combines ─┼ ──▶ stage 2       two messages per stage, whatever the model
    stage 3 ──▶ ┘                    └ ──▶ stage 3

It is a small step of its own. It begins when this rank's steps before it are done. Its messages bear a program number
of their own, so that a rank which does something else meanwhile is found out as for any step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.job.program_numbers import agree_on_number
from smp_tf.job_state import JobState
from smp_tf.op_by_op import op_by_op
from smp_tf.ops import send_recv
from smp_tf.partition.mesh import CommGroup


@dataclass(frozen=True)
class StageReduction:
    """A way to put together what the stages have.

    Args:
        code: a number of its own, by which ranks that reduce different things are told apart.
        name: what it computes, in words.
        combine: from one float64 vector per stage, all of one length, makes the vector that every stage gets.
    """

    code: int
    name: str
    combine: Callable[[Sequence[tf.Tensor]], tf.Tensor]


class _Running:
    """What is kept of reductions: the number of their program, and what reduces eager vectors, by kind."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.eager: dict[int, Any] = {}


_running = JobState(_Running)


def over_stages(own: tf.Tensor, reduction: StageReduction) -> tf.Tensor:
    """Reduces a vector over the stages of this replica; every rank of it must call this.

    Args:
        own: what this stage has, float64[n].
        reduction: what is made of it.

    Returns:
        What `reduction.combine` makes of the vectors of all stages: the same bits on every rank.
    """
    running = runtime.current()
    if running.topology.stages == 1:
        return reduction.combine([own])
    kept = _running()
    if kept.number is None:
        with tf.init_scope():
            kept.number = agree_on_number(f"{reduction.name} for the first time")
    if not tf.executing_eagerly():
        return _emit(own, reduction)
    if reduction.code not in kept.eager:
        signature = [tf.TensorSpec([None], tf.float64)]
        kept.eager[reduction.code] = tf.function(
            lambda vector: _emit(vector, reduction), autograph=False, input_signature=signature
        )
    return kept.eager[reduction.code](own)


@op_by_op()
def _emit(own: tf.Tensor, reduction: StageReduction) -> tf.Tensor:
    """Writes the reduction into the current graph."""
    topology = runtime.current().topology
    number = _running().number
    assert number is not None
    ranks, stage = topology.members(CommGroup.PP_GROUP), topology.stage
    step = send_recv.begin_step([], number)
    where: dict[str, Any] = {"program": number, "microbatch": 0}
    there, back = f"{reduction.name}: the part of stage {{}}", f"{reduction.name}: the result for stage {{}}"
    told = tf.concat([[tf.constant(reduction.code, tf.float64)], own], axis=0)
    ops = []
    if stage == 0:
        parts = [told]
        for other in range(1, len(ranks)):
            label = there.format(other)
            parts.append(send_recv.recv(step, tf.float64, [None], src=ranks[other], edge=other, label=label, **where))
        checks = [_alike(parts[0], part, ranks, other, reduction) for other, part in enumerate(parts[1:], start=1)]
        with tf.control_dependencies(checks):
            result = tf.identity(reduction.combine([part[1:] for part in parts]))
        for other in range(1, len(ranks)):
            label, edge = back.format(other), len(ranks) + other
            ops.append(send_recv.send(result, step, dest=ranks[other], edge=edge, label=label, **where))
    else:
        ops.append(send_recv.send(told, step, dest=ranks[0], edge=stage, label=there.format(stage), **where))
        label, edge = back.format(stage), len(ranks) + stage
        # What comes is made of what was sent, which no other edge says: see `op_by_op`.
        with tf.control_dependencies([told]):
            result = send_recv.recv(step, tf.float64, [None], src=ranks[0], edge=edge, label=label, **where)
        ops.append(result.op)
    with tf.control_dependencies(ops):
        send_recv.end_step(number)
    return result


def _alike(first: tf.Tensor, part: tf.Tensor, ranks: Sequence[int], other: int, reduction: StageReduction) -> Any:
    """Returns the check that another stage reduces the same thing as the first."""
    same = tf.logical_and(tf.equal(first[0], part[0]), tf.equal(tf.size(first), tf.size(part)))
    return tf.debugging.Assert(
        same,
        [
            f"smp_tf: {reduction.name} needs the same list on every rank of the replica, with None for a gradient that "
            f"another rank has, and the same call. Rank {ranks[0]} gave",
            tf.size(first) - 1,
            f"entries and rank {ranks[other]} gave (of kind, here {reduction.code})",
            tf.size(part) - 1,
            part[0],
        ],
    )

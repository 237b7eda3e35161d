"""Combines a few numbers of every stage, as a norm or a check over all gradients needs it.

    stage 1 ──▶ ┐                    ┌ ──▶ stage 1
    stage 2 ──▶ ┼ stage 0: combines ─┼ ──▶ stage 2       two messages per stage, whatever the model
    stage 3 ──▶ ┘                    └ ──▶ stage 3

It is a small step of its own. It begins when this rank's earlier steps are done. Its messages bear their own program
number. So a rank that does something else meanwhile is noticed, as for any step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.job.program_numbers import agree_on_number
from smp_tf.job_state import JobState
from smp_tf.ops import send_recv
from smp_tf.partition.mesh import CommGroup
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.kinds import SUM, TELL
from smp_tf.pipeline.programs.stage_sums import stage_sum
from smp_tf.pipeline.task import Kind
from smp_tf.tf_internals import op_by_op


@dataclass(frozen=True)
class StageReduction:
    """A way to combine the values of the stages.

    Args:
        code: a unique number. It shows where ranks reduce different things.
        name: words for what it computes.
        combine: takes one float64 vector per stage, all of one length, and returns the vector that every stage gets.
    """

    code: int
    name: str
    combine: Callable[[Sequence[tf.Tensor]], tf.Tensor]


class _Running:
    """What is kept of reductions: the number of their program, and the functions for eager vectors, by kind."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.eager: dict[int, Any] = {}


_running = JobState(_Running)


def over_stages(own: tf.Tensor, reduction: StageReduction) -> tf.Tensor:
    """Reduces a vector over the stages of this replica. Every rank of the replica must call it.

    Args:
        own: the vector of this stage, float64[n].
        reduction: how the vectors are combined.

    Returns:
        The result of `reduction.combine` for the vectors of all stages, with the same bits on every rank.
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
    """Writes the tasks of the reduction's program into the current graph, one after the other."""
    topology = runtime.current().topology
    number = _running().number
    assert number is not None
    step = send_recv.begin_step([], number)
    told = tf.concat([[tf.constant(reduction.code, tf.float64)], own], axis=0)
    program = stage_sum(topology.stages)
    check(program)
    sums = _StageSum(reduction, told, step, number, topology.members(CommGroup.PP_GROUP), topology.stage)
    for task in program.ranks[topology.stage]:
        _EMITTERS[task.kind](sums)
    with tf.control_dependencies(sums.ops):
        send_recv.end_step(number)
    assert sums.result is not None
    return sums.result


@dataclass
class _StageSum:
    """What is known while the tasks of a reduction are written.

    Args:
        reduction: which.
        told: the reduction's code, and the vector of this stage.
        step: number of the step.
        number: of the program.
        ranks: world rank of every stage.
        stage: of this rank.
        result: the vector that every stage gets, once it is there.
        ops: ops that have to run before the step ends.
    """

    reduction: StageReduction
    told: tf.Tensor
    step: tf.Tensor
    number: int
    ranks: Sequence[int]
    stage: int
    result: tf.Tensor | None = None
    ops: list[tf.Operation] = field(default_factory=list)

    def label(self, stage: int, *, is_result: bool) -> str:
        """Returns words for what is sent."""
        return f"{self.reduction.name}: the {'result for' if is_result else 'part of'} stage {stage}"

    def send(self, tensor: tf.Tensor, *, to: int, of: int, edge: int, is_result: bool) -> None:
        """Sends a vector to a stage."""
        label = self.label(of, is_result=is_result)
        where: dict[str, Any] = {"program": self.number, "microbatch": 0, "edge": edge, "label": label}
        self.ops.append(send_recv.send(tensor, self.step, dest=self.ranks[to], **where))

    def receive(self, *, source: int, of: int, edge: int, is_result: bool) -> tf.Tensor:
        """Receives a vector from a stage."""
        label = self.label(of, is_result=is_result)
        where: dict[str, Any] = {"program": self.number, "microbatch": 0, "edge": edge, "label": label}
        return send_recv.recv(self.step, tf.float64, [None], src=self.ranks[source], **where)


def _tell(sums: _StageSum) -> None:
    """Sends this stage's vector to the first stage."""
    sums.send(sums.told, to=0, of=sums.stage, edge=sums.stage, is_result=False)


def _sum(sums: _StageSum) -> None:
    """Combines the vectors of all stages on the first stage, and receives the result on the others."""
    ranks, stage = sums.ranks, sums.stage
    if stage > 0:
        # What is received depends on what was sent, and no other edge says so (`op_by_op`).
        with tf.control_dependencies([sums.told]):
            sums.result = sums.receive(source=0, of=stage, edge=len(ranks) + stage, is_result=True)
        sums.ops.append(sums.result.op)
        return
    others = range(1, len(ranks))
    parts = [sums.told, *(sums.receive(source=other, of=other, edge=other, is_result=False) for other in others)]
    checks = [_alike(parts[0], part, ranks, other, sums.reduction) for other, part in enumerate(parts[1:], start=1)]
    with tf.control_dependencies(checks):
        sums.result = tf.identity(sums.reduction.combine([part[1:] for part in parts]))
    for other in others:
        sums.send(sums.result, to=other, of=other, edge=len(ranks) + other, is_result=True)


#: The functions that write the ops of each task of a reduction.
_EMITTERS: dict[Kind, Callable[[_StageSum], None]] = {TELL: _tell, SUM: _sum}


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

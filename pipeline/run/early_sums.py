"""Sums of gradients that the last task to make some gives before it ends, so that their average begins within it.

    function of B3      ├─ g7 ─ g6 ───── g5 ─ g4 ───── g3 ─ g2 ─ g1 ─┤ its outputs
                              ┆               ┆                  ┆
    graph of the step         └▶ bucket 0 ──▶ └▶ bucket 1 ──▶    └▶ bucket 2 ──▶

Each sum is given once the last microbatch has been added to it. The buckets are averaged in the graph of the step, like
all others. Each bucket's weights are updated when its average is there, whether or not others are still under way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from smp_tf.ops.early import give_early, take_early
from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.split.split import Split
from smp_tf.pipeline.run.host import on_device
from smp_tf.pipeline.run.reduction import Bucket, parts_of, when_of
from smp_tf.pipeline.task import Task


@dataclass(frozen=True)
class EarlySums:
    """The sums that a task's function gives to the graph of the step before it ends.

    Args:
        task: the task.
        tensors: the gradients whose sums over the microbatches it gives.
        program: number of the program.
        device: the device of the sums; None for where they are made.
    """

    task: Task
    tensors: tuple[Tensor, ...]
    program: int
    device: str | None = None

    def give(self, sum_of: Callable[[Tensor], tf.Tensor], step: tf.Tensor) -> None:
        """Adds the ops to the task's function that give the sums.

        Args:
            sum_of: returns the sum of a gradient over the microbatches, with the one that is added now.
            step: number of the step.
        """
        for number, tensor in enumerate(self.tensors):
            with on_device(self.device):
                give_early(sum_of(tensor), step, program=self.program, number=number)

    def take(self, graph: OpGraph, step: tf.Tensor) -> Iterator[tuple[Tensor, tf.Tensor]]:
        """Adds the ops to the graph of the step that take the sums.

        Args:
            graph: of the cut step.
            step: number of the step.

        Yields:
            A gradient, and its sum.
        """
        for number, tensor in enumerate(self.tensors):
            kind = graph.type_of(tensor)
            with on_device(self.device):
                yield (
                    tensor,
                    take_early(
                        step,
                        tf.dtypes.as_dtype(kind.dtype),
                        tf.TensorShape(kind.shape),
                        program=self.program,
                        number=number,
                    ),
                )


def plan_early_sums(
    split: Split,
    stage: int,
    tasks: Sequence[Task],
    buckets: Sequence[Bucket],
    whole: Collection[Tensor],
    *,
    program: int,
    device: str | None = None,
) -> EarlySums | None:
    """Returns the sums that a rank's last task that makes gradients can give before it ends.

    Args:
        split: the cut step.
        stage: of this rank.
        tasks: tasks of the rank, in order, with transfers.
        buckets: all buckets of the rank.
        whole: the gradients whose sum over the microbatches a task's function can have.
        program: number of the program.
        device: the device of the sums; None for where they are made.

    Returns:
        All that the task makes of the buckets' gradients; None where there is no such task, or where something is sent
        or received after it.
    """
    segments = split.segments_of(stage)
    wanted = {t for bucket in buckets for i in bucket.positions for t in parts_of(split.outputs[i])}
    for task in reversed(tasks):
        if task.kind.is_transfer:
            return None
        segment = segments.get(when_of(task)) if task.kind.is_compute else None
        if segment is None or wanted.isdisjoint(segment.outputs):
            continue
        given = sorted(wanted.intersection(segment.outputs).intersection(whole))
        return EarlySums(task, tuple(given), program, device) if given else None
    return None


def with_shares(
    split: Split, early: EarlySums, buckets: Sequence[Bucket], seconds: Sequence[float]
) -> tuple[Bucket, ...]:
    """Returns the buckets of a stage, each with the share of the last task after which all of the bucket is there.

    Args:
        split: the cut step.
        early: the sums that the last task gives before it ends.
        buckets: of the stage.
        seconds: how long every node of the step takes.
    """
    segment = split.segments[when_of(early.task)]
    after: dict[int, float] = {}
    whole = 0.0
    for number in segment.nodes:
        whole += seconds[number]
        after[number] = whole
    found = []
    for bucket in buckets:
        made = {t for i in bucket.positions for t in parts_of(split.outputs[i])}.intersection(segment.outputs)
        if made and whole and made <= set(early.tensors):
            share = max(after[tensor.node] for tensor in made) / whole
            bucket = dataclasses.replace(bucket, makers=dataclasses.replace(bucket.makers, share=share))
        found.append(bucket)
    return tuple(found)

"""What one rank runs in a step, made ready: its task list, and the functions that the tasks call.

cut step ──▶ plan_program: the tasks of all stages ──▶ build_stage_program: the functions of one ──▶ executor
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from smp_tf.partition.graph.op_graph import Tensor
from smp_tf.partition.split.split import Segment, Split
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.input_checks import add_input_checks
from smp_tf.pipeline.programs.reductions import add_reductions
from smp_tf.pipeline.run.accumulator import Accumulator, fits
from smp_tf.pipeline.run.early_sums import EarlySums, plan_early_sums
from smp_tf.pipeline.run.reduction import (
    Bucket,
    Gradients,
    Reduce,
    Reduction,
    group_gradients,
    plan_buckets,
    plan_sparse_buckets,
    when_of,
)
from smp_tf.pipeline.run.segment_function import SegmentFunction, build_segment_function
from smp_tf.pipeline.schedules.schedule import add_transfers, program_of
from smp_tf.pipeline.task import Edge, Program, Task


@dataclass(frozen=True)
class StageProgram:
    """What one rank runs in a step: its task list and the functions the tasks call.

    Args:
        split: the cut step.
        stage: the stage of this rank.
        ranks: world rank of every stage of this replica.
        planned: the tasks of all stages.
        functions: this stage's segments as functions, by chunk, sweep and part of it.
        summed: the tensors made here of which only, or also, the sum over the microbatches is wanted.
        kept: those of them whose value per microbatch is wanted too.
        accumulators: the sums that the functions add to themselves; other sums are added up in the caller's graph.
        sums_on: the device where sums are kept; None for where what is summed is.
        weighted: whether microbatches weigh differently in sums.
        number: program number, equal on all ranks, first part of every message's tag.
        microbatches: number of microbatches.
        variables: TensorFlow variables by index in the op graph.
        reduction: how gradients are averaged over the replicas; None where there is one replica.
        buckets: what is averaged together, by the numbers of the REDUCE tasks.
        last: the last task that makes gradients, where it gives their sums before it ends, and its function; else None.
    """

    split: Split
    stage: int
    ranks: tuple[int, ...]
    planned: Program
    functions: Mapping[tuple[int, int, int], SegmentFunction]
    summed: frozenset[Tensor]
    kept: frozenset[Tensor]
    accumulators: Mapping[Tensor, Accumulator]
    weighted: bool
    number: int
    microbatches: int
    variables: Mapping[int, tf.Variable]
    reduction: Reduction | None = None
    buckets: tuple[Bucket, ...] = ()
    last: tuple[Task, SegmentFunction] | None = None
    sums_on: str | None = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of this stage, in order."""
        return self.planned.ranks[self.stage]

    def function_of(self, task: Task) -> SegmentFunction | None:
        """Returns what a compute task calls; None where it has nothing to do."""
        if self.last is not None and task == self.last[0]:
            return self.last[1]
        assert task.sweep is not None
        return self.functions.get((task.chunk, task.sweep, task.part))


def plan_program(split: Split, schedule: str, microbatches: int) -> Program:
    """Returns the tasks of all stages for a cut step, transfers included.

    Args:
        split: the cut step.
        schedule: name or text of the schedule.
        microbatches: number of microbatches.

    Returns:
        One task list per stage, which was checked to have every task once, in order, and to end.
    """
    edges = edges_of(split)
    sweeps = max(2, split.sweeps)
    kind = schedule if any(sweep == 1 for _, sweep, _ in split.segments) else "simple"
    program = add_transfers(program_of(kind, split.placement, microbatches, sweeps=sweeps), edges)
    check(program, edges)
    return program


def edges_of(split: Split) -> list[Edge]:
    """Returns what flows between the chunks of a cut step, as a program names it; what stays on a rank is not sent."""
    return [
        Edge(
            t.index, t.src_chunk, t.src_sweep, t.dst_chunk, t.dst_sweep,
            "step" if t.once_per_step else "microbatch",
        )
        for t in (*split.transfers, *split.handed_on)
    ]  # fmt: skip


def buckets_of(
    split: Split,
    stages: int,
    limit: int | None = None,
    known: Mapping[int, int] | None = None,
    sparse: Sequence[tuple[int, ...]] = (),
    keep: frozenset[int] = frozenset(),
) -> list[tuple[Bucket, ...]]:
    """Returns what all stages average together over replicas.

    Args:
        split: the cut step.
        stages: their number.
        limit: bytes with which a bucket is full; None for what is usual.
        known: bytes of gradients, by position among the outputs, where their variables do not say it.
        sparse: the positions of the parts of each sparse gradient among the outputs.
        keep: positions of gradient outputs whose value per microbatch is wanted besides their sum.
    """
    found = []
    for stage in range(stages):
        dense = plan_buckets(split, stage, group_gradients(split, stage, limit, known), known)
        summed = summed_of(split, stage)
        summed -= {split.outputs[position].tensor for position in keep}
        found.append((*dense, *plan_sparse_buckets(split, stage, sparse, len(dense), summed)))
    return found


def summed_of(split: Split, stage: int) -> set[Tensor]:
    """Finds the tensors that a stage makes of which only, or also, the sum over the microbatches is wanted.

    Args:
        split: the cut step.
        stage: which stage.
    """
    made = {t for segment in split.segments_of(stage).values() for t in segment.outputs}
    summed = {o.tensor for o in split.outputs if o.is_summed and split.stage_of(o) == stage}
    return summed | {t for o in split.outputs for t in o.summands if t in made}


def build_stage_program(
    split: Split,
    stage: int,
    ranks: Sequence[int],
    program: Program,
    number: int,
    variables: Mapping[int, tf.Variable],
    *,
    keep: frozenset[int] = frozenset(),
    weighted: bool = False,
    xla: bool = False,
    samples: int = 1,
    reduce: Reduce | None = None,
    gradients: Gradients = Gradients(),  # noqa: B008 - it never changes
    bucket_bytes: int | None = None,
    sums_on: str | None = None,
    checks_inputs: bool = False,
    sparse: Sequence[tuple[int, ...]] = (),
) -> StageProgram:
    """Traces the functions of one stage.

    Args:
        split: the cut step.
        stage: which stage.
        ranks: world rank of every stage.
        program: the tasks of all stages.
        number: program number, equal on all ranks.
        variables: the variables whose handles this rank may use, by index in the op graph.
        keep: positions of gradient outputs whose value per microbatch is wanted besides their sum.
        weighted: whether microbatches weigh differently in sums.
        xla: compile the functions with XLA, where XLA can.
        samples: samples of a microbatch, where the graph leaves that length open.
        reduce: sums tensors over the replicas; None where there is one replica.
        gradients: what is known of those that are summed over the replicas.
        bucket_bytes: with so many, gradients that are summed over the replicas together are enough; None for what is
            usual.
        sums_on: TensorFlow's name of the device where sums over the microbatches are kept; None for where what is
            summed is.
        checks_inputs: whether the ranks of a replica compare their batches.
        sparse: the positions of the parts of each sparse gradient among the outputs.

    Returns:
        The program of this rank.
    """
    segments = split.segments_of(stage)
    made = {t for segment in segments.values() for t in segment.outputs}
    summed = summed_of(split, stage)
    kept = frozenset(split.outputs[position].tensor for position in keep) & summed
    # A single microbatch is its own sum.
    accumulators = {
        t: Accumulator(split.graph.type_of(t), f"smp_sum_{number}_{count}", sums_on)
        for count, t in enumerate(sorted(summed & made))
        if program.microbatches > 1 and fits(split.graph.type_of(t))
    }

    def build(when: tuple[int, int, int], early: EarlySums | None = None) -> SegmentFunction:
        segment = segments[when]
        own = {t: accumulators[t] for t in segment.outputs if t in accumulators}
        others = [other for other in segments.values() if other is not segment]
        taken = own.keys() | set(early.tensors if early is not None else ())
        return build_segment_function(
            split.graph,
            segment,
            variables,
            outputs=tuple(t for t in segment.outputs if t not in taken or t in kept or _is_read(split, others, t)),
            accumulators=own,
            weighted=weighted,
            early=early,
            sums_on=sums_on,
            summed=summed,
            xla=xla,
            samples=samples,
        )

    reduction: Reduction | None = None
    buckets: tuple[Bucket, ...] = ()
    last: tuple[Task, SegmentFunction] | None = None
    if checks_inputs:
        program = add_input_checks(program)
    if reduce is not None:
        reduction = Reduction(reduce, number, stage, gradients)
        of_stages = buckets_of(split, program.stages, bucket_bytes, gradients.nbytes, sparse, keep)
        buckets = of_stages[stage]
        program = add_reductions(program, [bucket.makers for each in of_stages for bucket in each])
        is_whole = accumulators.keys() if program.microbatches > 1 else summed & made
        # What XLA compiles gives nothing before it ends.
        early: EarlySums | None = None
        if not xla:
            tasks, dense = program.ranks[stage], [bucket for bucket in buckets if not bucket.is_sparse]
            early = plan_early_sums(split, stage, tasks, dense, is_whole, program=number, device=sums_on)
        if early is not None:
            last = early.task, build(when_of(early.task), early)
    if checks_inputs or reduce is not None:
        check(program, edges_of(split))
    only = {when_of(last[0])} if last is not None and program.microbatches == 1 else set()
    functions = {when: build(when) for when in segments if when not in only}
    return StageProgram(
        split=split,
        stage=stage,
        ranks=tuple(ranks),
        planned=program,
        functions=functions,
        summed=frozenset(summed),
        kept=kept,
        accumulators=accumulators,
        weighted=weighted,
        number=number,
        microbatches=program.microbatches,
        variables=variables,
        reduction=reduction,
        buckets=buckets,
        last=last,
        sums_on=sums_on,
    )


def _is_read(split: Split, others: Sequence[Segment], tensor: Tensor) -> bool:
    """Returns whether somebody needs a tensor of every microbatch: another segment of the stage, or another stage."""
    return any(tensor in s.inputs for s in others) or any(t.tensor == tensor and not t.is_sum for t in split.transfers)

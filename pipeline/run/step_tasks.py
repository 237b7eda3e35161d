"""The tasks of all stages of a cut step: those of its microbatches, and those that passes put in once a step.

cut step ──▶ plan_program: compute and transfers ──▶ add_stage_tasks: WEIGH, REDUCE, CHECK ──▶ checked lists
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smp_tf.partition.split.split import Split
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.input_checks import add_input_checks
from smp_tf.pipeline.programs.reductions import add_reductions, check_replicas
from smp_tf.pipeline.programs.weights_of_replicas import add_weights_of_replicas
from smp_tf.pipeline.run.microbatch_sums import summed_of
from smp_tf.pipeline.run.reduction import Averaging, Bucket, group_gradients, plan_buckets, plan_sparse_buckets
from smp_tf.pipeline.schedules.schedule import add_transfers, program_of
from smp_tf.pipeline.task import Edge, Program


@dataclass(frozen=True)
class StageTasks:
    """What the stages of a step do once a step, for all of their chunks.

    Args:
        averaging: how gradients are averaged over the replicas; None where there is one replica.
        weighs: whether replicas add up how much their gradients count.
        checks_inputs: whether the ranks of a replica compare their batches.
    """

    averaging: Averaging | None = None
    weighs: bool = False
    checks_inputs: bool = False


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


def add_stage_tasks(
    split: Split, program: Program, tasks: StageTasks, keep: frozenset[int] = frozenset()
) -> tuple[Program, list[tuple[Bucket, ...]]]:
    """Puts into a program what its stages do once a step, and checks that it still ends.

    Args:
        split: the cut step.
        program: as `plan_program` returns it.
        tasks: what they do.
        keep: positions of gradient outputs whose value per microbatch is wanted besides their sum.

    Returns:
        The program, and what each stage averages together over the replicas.
    """
    averaging = tasks.averaging
    buckets: list[tuple[Bucket, ...]] = [()] * program.stages
    if tasks.checks_inputs:
        program = add_input_checks(program)
    if averaging is not None:
        known = averaging.gradients.nbytes
        buckets = buckets_of(split, program.stages, averaging.bucket_bytes, known, averaging.sparse, keep)
        program = add_reductions(program, [bucket.makers for own in buckets for bucket in own])
    if tasks.weighs:
        program = add_weights_of_replicas(program)
    if tasks != StageTasks():
        check(program, edges_of(split))
    return program, buckets


def check_other_replicas(
    split: Split, program: Program, schedule: str, most: int, tasks: StageTasks, keep: frozenset[int] = frozenset()
) -> None:
    """Raises an error unless a replica averages in the order of those that run the largest number of microbatches.

    A replica with a smaller batch runs fewer. Each holds its own lists against those of the one number that all know,
    so all replicas agree where each of them does.

    Args:
        split: the cut step.
        program: the tasks of this replica, those that are done once a step included.
        schedule: name or text of the schedule.
        most: the largest number of microbatches that a replica runs.
        tasks: what the stages do once a step.
        keep: positions of gradient outputs whose value per microbatch is wanted besides their sum.

    Raises:
        ProgramError: the orders differ; the message says who waits for whom.
    """
    if program.microbatches == most:
        return
    others, _ = add_stage_tasks(split, plan_program(split, schedule, most), tasks, keep)
    check_replicas([program, others])

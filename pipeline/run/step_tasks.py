"""Makes the tasks of all stages of a cut step: those of its microbatches, and those that run once per step.

cut step ──▶ plan_program: compute and transfers ──▶ add_stage_tasks: WEIGH, REDUCE, CHECK, APPLY, LOG
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smp_tf.partition.split.split import Split
from smp_tf.partition.units.cost import node_seconds
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.input_checks import add_input_checks
from smp_tf.pipeline.programs.logs import add_joins, add_logs
from smp_tf.pipeline.programs.reductions import add_reductions, check_replicas
from smp_tf.pipeline.programs.replica_order import check_replica_order
from smp_tf.pipeline.programs.updates import add_updates
from smp_tf.pipeline.programs.weights_of_replicas import add_weights_of_replicas
from smp_tf.pipeline.run.early_sums import plan_early_sums, with_shares
from smp_tf.pipeline.run.microbatch_sums import summed_of, sums_of_functions
from smp_tf.pipeline.run.reduction import (
    Averaging,
    Bucket,
    group_gradients,
    plan_buckets,
    plan_sparse_buckets,
    when_of,
)
from smp_tf.pipeline.run.replica_sums import sums_in
from smp_tf.pipeline.schedules.schedule import add_transfers, program_of
from smp_tf.pipeline.task import BucketMakers, Edge, Program


@dataclass(frozen=True)
class Updates:
    """How a step's weights are updated.

    Args:
        stage_sums: how often the stages put numbers together before, such as for a norm that an optimizer clips by.
        by_script: whether the script calls the optimizer, after the step. Otherwise the step does, as in `fit`.
    """

    stage_sums: int = 0
    by_script: bool = False


@dataclass(frozen=True)
class StageTasks:
    """What the stages do once per step, for all of their chunks.

    Args:
        averaging: how gradients are averaged over the replicas; None where there is one replica.
        updates: how weights are updated; None where the step has no gradients.
        weighs: whether replicas add up how much their gradients count.
        checks_inputs: whether the ranks of a replica compare their batches.
        joins: whether replicas bring together what they have made of their samples.
        logs: whether what is logged of a batch is averaged over the replicas in the graph of the step.
        gives_early: whether the last task gives sums before it ends. What XLA compiles does not.
    """

    averaging: Averaging | None = None
    updates: Updates | None = None
    weighs: bool = False
    checks_inputs: bool = False
    joins: bool = False
    logs: bool = False
    gives_early: bool = True


def plan_program(split: Split, schedule: str, microbatches: int) -> Program:
    """Returns the tasks of all stages for a cut step, with transfers.

    Args:
        split: the cut step.
        schedule: name or text of the schedule.
        microbatches: number of microbatches.

    Returns:
        One task list per stage. It is checked that each has every task once and in order, and that all end.
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
    """Returns the buckets that all stages average over replicas.

    Args:
        split: the cut step.
        stages: number of stages.
        limit: bytes with which a bucket is full; None for the usual limit.
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
    split: Split, program: Program, tasks: StageTasks, keep: frozenset[int] = frozenset(), samples: int = 1
) -> tuple[Program, list[tuple[Bucket, ...]]]:
    """Puts into a program what its stages do once per step.

    Args:
        split: the cut step.
        program: the program of `plan_program`.
        tasks: what the stages do.
        keep: positions of gradient outputs whose value per microbatch is wanted besides their sum.
        samples: samples of a microbatch, where the graph does not say their number.

    Returns:
        The program, and the buckets that each stage averages over the replicas.
    """
    averaging = tasks.averaging
    buckets: list[tuple[Bucket, ...]] = [()] * program.stages
    if averaging is not None:
        known = averaging.gradients.nbytes
        buckets = buckets_of(split, program.stages, averaging.bucket_bytes, known, averaging.sparse, keep)
        buckets = [
            (*own, *_others(split, stage, len(own), averaging.others.get(stage, 0)))
            for stage, own in enumerate(buckets)
        ]
        if tasks.gives_early:
            seconds = node_seconds(split.graph, unknown=samples)
            buckets = [_with_shares(split, stage, program, own, seconds) for stage, own in enumerate(buckets)]
        program = add_reductions(program, [bucket.makers for own in buckets for bucket in own])
    if tasks.checks_inputs:
        program = add_input_checks(program)
    if tasks.weighs:
        program = add_weights_of_replicas(program)
    if tasks.joins:
        program = add_joins(program)
    if tasks.updates is not None:
        numbers = _updated_together(split, buckets) if averaging is not None else _trained_by(split)
        program = add_updates(program, numbers, stage_sums=tasks.updates.stage_sums, by_script=tasks.updates.by_script)
    if tasks.logs:
        program = add_logs(program)
    return program, buckets


def _with_shares(
    split: Split, stage: int, program: Program, buckets: tuple[Bucket, ...], seconds: Sequence[float]
) -> tuple[Bucket, ...]:
    """Returns the buckets of a stage, those that are whole before the last task ends with that task's share."""
    dense = [bucket for bucket in buckets if not bucket.is_sparse]
    whole = sums_of_functions(split, stage, program.microbatches)
    early = plan_early_sums(split, stage, program.ranks[stage], dense, whole, program=0)
    return buckets if early is None else with_shares(split, early, buckets, seconds)


def _others(split: Split, stage: int, number: int, nbytes: int) -> tuple[Bucket, ...]:
    """Returns the bucket of what a stage averages besides the gradients that are known, after all of its tasks."""
    if not nbytes:
        return ()
    makers = BucketMakers(stage, number, frozenset(split.segments_of(stage)), nbytes=nbytes)
    return (Bucket(number, (), makers),)


def _updated_together(split: Split, buckets: Sequence[Sequence[Bucket]]) -> dict[int, list[int | None]]:
    """Returns the buckets by which each stage updates its weights; None stands for its sparse gradients."""
    found: dict[int, list[int | None]] = {}
    for stage, own in enumerate(buckets):
        numbers: list[int | None] = [bucket.number for bucket in own if not bucket.is_sparse]
        if any(bucket.is_sparse for bucket in own):
            numbers.append(None)
        if numbers:
            found[stage] = numbers
    return found


def _trained_by(split: Split) -> dict[int, list[int | None]]:
    """Returns that each stage which trains a weight updates all of them together."""
    return {stage: [None] for stage, nbytes in enumerate(trained_bytes(split)) if nbytes}


def trained_bytes(split: Split) -> tuple[int, ...]:
    """Returns the bytes of the weights that each stage trains.

    Args:
        split: the cut step.
    """
    found = [0] * split.stages
    for variable in {gradient.variable for gradient in split.graph.gradients}:
        stage = split.stage_of_variable(variable)
        if stage is not None:
            found[stage] += split.graph.variables[variable].type.nbytes()
    return tuple(found)


def check_other_replicas(
    split: Split,
    program: Program,
    schedule: str,
    most: int,
    tasks: StageTasks,
    keep: frozenset[int] = frozenset(),
    replicas: int = 2,
) -> None:
    """Raises an error unless a replica averages in the order of those with the most microbatches.

    A replica with a smaller batch runs fewer microbatches. Each compares its own lists with those for the one number
    that all know. So all replicas agree where each of them does. Sums over the replicas within tasks are checked for
    all numbers that the others may have.

    Args:
        split: the cut step.
        program: the tasks of this replica, with those that run once per step.
        schedule: name or text of the schedule.
        most: the largest number of microbatches that a replica runs.
        tasks: what the stages do once a step.
        keep: positions of gradient outputs whose value per microbatch is wanted besides their sum.
        replicas: number of replicas.

    Raises:
        ProgramError: the orders differ. The message says who waits for whom.
    """
    if program.microbatches == most:
        return
    edges = edges_of(split)
    others, _ = add_stage_tasks(split, plan_program(split, schedule, most), tasks, keep)
    check(others, edges)
    check_replicas([program, others])
    with_sums = {visit for visit, segment in split.segments.items() if sums_in(split.graph, segment)}
    if with_sums:
        # Of several others, nobody knows how many microbatches each runs. Those with the most know nothing of this one.
        numbers = (program.microbatches, most) if replicas == 2 else range(1, most + 1)
        every = [plan_program(split, schedule, number) for number in numbers]
        check_replica_order(every, edges, lambda task: when_of(task) in with_sums)

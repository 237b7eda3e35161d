"""Simulates what runs when in a step that a plan has cut, by the costs of its units."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.split.split import Split, Transfer
from smp_tf.partition.units.cost import Costs
from smp_tf.partition.units.units import Unit
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.kinds import REDUCE
from smp_tf.pipeline.programs.reductions import add_reductions
from smp_tf.pipeline.programs.shared_host import Sharing, simulate_on_hosts
from smp_tf.pipeline.programs.simulate import Timeline, simulate
from smp_tf.pipeline.run.step_tasks import buckets_of, edges_of, plan_program
from smp_tf.pipeline.task import Program, Task


def timeline_of(
    plan: Plan,
    units: Sequence[Unit],
    costs: Costs,
    split: Split,
    samples: int,
    ranks: Ranks | None = None,
    reduce_seconds: Sequence[float] | None = None,
) -> Timeline:
    """Returns what runs when, by the costs of units.

    Args:
        plan: where the units are.
        units: of the step.
        costs: costs of the units.
        split: the step, cut by the plan.
        samples: samples of a microbatch, where the graph does not say their number.
        ranks: how the ranks differ from the machine of the costs; None where they do not.
        reduce_seconds: how long each stage takes to average its gradients over the replicas; None where nothing is
            averaged, or the time is unknown.
    """
    ranks, placement = ranks or Ranks.alike(plan.stages), plan.placement
    forward, inputs, weights = ([0.0] * len(placement) for _ in range(3))
    for cost, chunk in zip(costs.units, plan.chunks_of(units), strict=True):
        speed = ranks.speed[placement[chunk]]
        forward[chunk] += cost.seconds.forward / speed
        inputs[chunk] += cost.input_gradient_seconds / speed
        weights[chunk] += cost.weight_gradient_seconds / speed
    times = [ChunkTimes(*each) for each in zip(forward, inputs, weights, strict=True)]

    def link(transfer: Transfer) -> float:
        ends = placement[transfer.src_chunk], placement[transfer.dst_chunk]
        return costs.machine.link * min(ranks.link[stage] for stage in ends)

    seconds: Mapping[int, float] = {
        t.index: split.graph.type_of(t.tensor).nbytes(samples) / link(t) if t.tensor is not None else 0.0
        for t in split.transfers
    } | {t.index: 0.0 for t in split.handed_on}
    program, edges = plan_program(split, plan.schedule, plan.microbatches), edges_of(split)
    program, once = _with_reductions(program, split, [row.gradient_bytes for row in plan.forecast], reduce_seconds)
    if costs.alone == (1.0, 1.0):
        return simulate(program, times, edges, comm=seconds, once=once)
    sharing = Sharing(ranks.hosts or (0,) * plan.stages, *costs.alone)
    return simulate_on_hosts(program, times, edges, sharing, comm=seconds, once=once)


def _with_reductions(
    program: Program, split: Split, gradient_bytes: Sequence[int], reduce_seconds: Sequence[float] | None
) -> tuple[Program, dict[Task, float]]:
    """Adds REDUCE tasks to the program, and gives each the time of its share of the stage's gradients.

    Gradients in no bucket, such as sparse ones, are averaged after all else.
    """
    if reduce_seconds is None or not any(reduce_seconds):
        return program, {}
    buckets = [bucket.makers for own in buckets_of(split, program.stages) for bucket in own]
    program = add_reductions(program, buckets)
    once: dict[Task, float] = {}
    ranks = []
    for stage, (tasks, nbytes, seconds) in enumerate(zip(program.ranks, gradient_bytes, reduce_seconds, strict=True)):
        own = [bucket for bucket in buckets if bucket.stage == stage]
        whole = max(nbytes, sum(bucket.nbytes for bucket in own)) or 1
        last = Task(REDUCE, stage, bucket=len(own))
        for bucket in own:
            once[Task(REDUCE, stage, bucket=bucket.number)] = seconds * bucket.nbytes / whole
        rest = whole - sum(bucket.nbytes for bucket in own)
        if rest:
            once[last] = seconds * rest / whole
        ranks.append((*tasks, last) if rest else tasks)
    return dataclasses.replace(program, ranks=tuple(ranks)), once

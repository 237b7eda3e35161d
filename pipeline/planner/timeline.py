"""Simulates what runs when in a step that was cut by a plan: the one place from which the time of a step comes.

A plan in a job and one that is made offline go by the same costs of units, and by the same prices of what is done once
a step: averages over replicas, sums over stages, updates of weights, checks of batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.split.split import Split, Transfer
from smp_tf.partition.units.cost import Costs, MessageCost
from smp_tf.partition.units.units import Unit
from smp_tf.pipeline.planner.memory_forecast import batch_bytes
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.kinds import priced
from smp_tf.pipeline.programs.prices import Prices, Speeds
from smp_tf.pipeline.programs.shared_host import Sharing, simulate_on_hosts
from smp_tf.pipeline.programs.simulate import SimulatedStep, simulate
from smp_tf.pipeline.run.reduction import Averaging
from smp_tf.pipeline.run.step_tasks import (
    StageTasks,
    Updates,
    add_stage_tasks,
    buckets_of,
    edges_of,
    plan_program,
    trained_bytes,
)
from smp_tf.pipeline.task import Program


def timeline_of(
    plan: Plan, units: Sequence[Unit], costs: Costs, split: Split, request: PlacementRequest
) -> SimulatedStep:
    """Returns what runs when, by the costs of units and the prices of what is done once a step.

    Args:
        plan: where the units are.
        units: of the step.
        costs: costs of the units.
        split: the step, cut by the plan.
        request: what the plan was made for.
    """
    ranks, samples = request.hardware.ranks or Ranks.alike(plan.stages), request.course.samples
    program, edges = plan_program(split, plan.schedule, plan.microbatches), edges_of(split)
    program, _ = add_stage_tasks(split, program, _stage_tasks(plan, split, request), samples=samples)
    times = _chunk_times(plan, units, costs, ranks, _handled(costs.machine.message, split, samples))
    seconds = _message_seconds(plan, costs, split, samples, ranks)
    once = priced(program, _prices(program, costs, split, request, ranks))
    if costs.alone == (1.0, 1.0):
        return simulate(program, times, edges, comm=seconds, once=once)
    sharing = Sharing(ranks.hosts or (0,) * plan.stages, *costs.alone)
    return simulate_on_hosts(program, times, edges, sharing, comm=seconds, once=once)


def _chunk_times(
    plan: Plan, units: Sequence[Unit], costs: Costs, ranks: Ranks, handled: Mapping[tuple[int, bool], float]
) -> list[ChunkTimes]:
    """Returns how long the tasks of each chunk take for one microbatch.

    Args:
        plan: where the units are.
        units: of the step.
        costs: costs of the units.
        ranks: how these differ.
        handled: seconds for messages of a chunk, forward or not.
    """
    placement = plan.placement
    forward, inputs, weights = ([0.0] * len(placement) for _ in range(3))
    for cost, chunk in zip(costs.units, plan.chunks_of(units), strict=True):
        speed = ranks.speed[placement[chunk]]
        forward[chunk] += cost.seconds.forward / speed
        inputs[chunk] += cost.input_gradient_seconds / speed
        weights[chunk] += cost.weight_gradient_seconds / speed
    for (chunk, is_forward), seconds in handled.items():
        (forward if is_forward else inputs)[chunk] += seconds / ranks.link[placement[chunk]]
    return [ChunkTimes(*each) for each in zip(forward, inputs, weights, strict=True)]


def _handled(message: MessageCost | None, split: Split, samples: int) -> dict[tuple[int, bool], float]:
    """Returns the processor's seconds for messages of a microbatch, by chunk and whether they are part of forward.

    Args:
        message: what a message takes at each of its ends; None where that was not measured.
        split: the step, cut.
        samples: of a microbatch.
    """
    found: dict[tuple[int, bool], float] = {}
    if message is None:
        return found
    for transfer in split.transfers:
        if transfer.once_per_step or transfer.tensor is None:
            continue
        seconds = message.of(split.graph.type_of(transfer.tensor).nbytes(samples))
        for chunk, sweep in ((transfer.src_chunk, transfer.src_sweep), (transfer.dst_chunk, transfer.dst_sweep)):
            found[chunk, not sweep] = found.get((chunk, not sweep), 0.0) + seconds
    return found


def _message_seconds(plan: Plan, costs: Costs, split: Split, samples: int, ranks: Ranks) -> Mapping[int, float]:
    """Returns how long each message is on its way, by its edge.

    Where it is known what messages take of a processor, this is part of the tasks that make and need them. Only a sum,
    which is sent once per step, is part of no task.
    """
    message = costs.machine.message
    if message is not None:
        return {
            t.index: 2 * message.of(split.graph.type_of(t.tensor).nbytes(samples)) if t.is_sum and t.tensor else 0.0
            for t in (*split.transfers, *split.handed_on)
        }

    def link(transfer: Transfer) -> float:
        ends = plan.placement[transfer.src_chunk], plan.placement[transfer.dst_chunk]
        return costs.machine.link * min(ranks.link[stage] for stage in ends)

    return {
        t.index: split.graph.type_of(t.tensor).nbytes(samples) / link(t) if t.tensor is not None else 0.0
        for t in split.transfers
    } | {t.index: 0.0 for t in split.handed_on}


def _stage_tasks(plan: Plan, split: Split, request: PlacementRequest) -> StageTasks:
    """Returns what the stages of the step do once a step."""
    once = request.once
    if not split.graph.gradients:
        return StageTasks(checks_inputs=once.checks_inputs)
    averaging: Averaging | None = None
    if request.storage.replicas > 1:
        known = [sum(bucket.makers.nbytes for bucket in own) for own in buckets_of(split, plan.stages)]
        rest = {stage: row.gradient_bytes - known[stage] for stage, row in enumerate(plan.forecast)}
        averaging = Averaging(others={stage: nbytes for stage, nbytes in rest.items() if nbytes > 0})
    return StageTasks(
        averaging,
        Updates(once.stage_sums),
        weighs=averaging is not None,
        checks_inputs=once.checks_inputs,
        gives_early=not once.is_compiled,
    )


def _prices(program: Program, costs: Costs, split: Split, request: PlacementRequest, ranks: Ranks) -> Prices:
    """Returns what the tasks are priced by that are done once a step."""
    machine, storage = costs.machine, request.storage
    rings = ranks.rings or (1.0,) * program.stages
    return Prices(
        tuple(
            Speeds(machine.memory * speed, machine.link * ring, request.once.sum_wait)
            for speed, ring in zip(ranks.speed, rings, strict=True)
        ),
        machine.op_seconds,
        storage.replicas,
        trained_bytes(split),
        {(bucket.stage, bucket.number): bucket.nbytes for bucket in program.buckets},
        storage.slots,
        storage.slot_shares,
        batch_bytes(split.graph, program.microbatches, request.course.samples),
    )

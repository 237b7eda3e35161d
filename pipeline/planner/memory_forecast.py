"""Forecasts what each stage of a cut step needs: the stash, messages and working sets of the real cut.

weights, gradients, slots │ from step to step
batch, constants          │ all of them, over the whole step
stash, messages, working  │ come and go: at their fullest, see `pipeline/programs/step_memory.py`
of the optimizer          │ when the stash is gone: averages, and what it makes of few weights at a time
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from smp_tf.partition.graph.op_graph import ARGUMENT, OpGraph, Tensor
from smp_tf.partition.plan.held_memory import as_held
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.plan.stage_forecast import Source, StageForecast, Traffic, Use
from smp_tf.partition.split.split import Split
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.planner.updates_at_once import most_at_once
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.step_memory import StepMemory, step_memory
from smp_tf.pipeline.run.step_tasks import edges_of, plan_program

#: TensorFlow's allocator may hand out larger pieces than it is asked for, where half of the piece would be too small.
#: Memory that comes and goes needs this part more (3 to 17 % were seen).
_ROUNDED_UP = 14
#: How many tensors of a weight's size an optimizer has at once while it updates the weight. Adam has two; others have
#: more or fewer.
_TENSORS_OF_UPDATE = 2
#: How many slots are copied at once while a sparse gradient is added to them. After rows of a variable were changed,
#: TensorFlow copies the variable whenever the whole of it is read or changed. It changes as many at once as ops run.
_COPIES_OF_SLOTS = 2


def with_exact_transfers(plan: Plan, done: Split, request: PlacementRequest) -> Plan:
    """Returns the plan with the stash, transfers and working sets of its real cut in place of the estimates.

    Args:
        plan: the plan.
        done: the step, cut by the plan.
        request: the request that the plan was made for.
    """
    held, _ = held_and_large(plan, done, request)
    return with_held(plan, done, request, held)


def held_and_large(
    plan: Plan, done: Split, request: PlacementRequest, least: int | None = None
) -> tuple[tuple[StepMemory, ...], tuple[StepMemory, ...]]:
    """Returns what comes and goes in each stage: of all tensors, and of large ones alone.

    Args:
        plan: the plan.
        done: the step, cut by the plan.
        request: the request that the plan was made for.
        least: bytes from which on a tensor is large. With None nothing is told of large ones.
    """
    program, edges = plan_program(done, plan.schedule, plan.microbatches), edges_of(done)
    # A backward pass takes about twice the time of the forward pass. A stage of unknown time takes some time, and all
    # chunks of a stage take equally long.
    shares = [max(row.time_share, 0.001) for row in plan.forecast]
    times = [ChunkTimes(*(shares[stage] / plan.placement.count(stage),) * 3) for stage in plan.placement]
    # The faster stage decides where a message lies. Where the times are estimates, the stages may also be equally fast.
    possible = [times] if request.times.seconds else [times, [ChunkTimes() for _ in times]]
    return step_memory(done, program, edges, possible, request.course.samples, least, request.beyond.nodes)


def with_held(plan: Plan, done: Split, request: PlacementRequest, held: Sequence[StepMemory], least: int = 0) -> Plan:
    """Returns the plan with what comes and goes in place of the estimates, and what the optimizer needs.

    Args:
        plan: the plan.
        done: the step, cut by the plan.
        request: the request that the plan was made for.
        held: what comes and goes in each stage.
        least: smaller tensors of the batch, and smaller weights, count as 0 bytes.
    """
    samples = request.course.samples
    batch = batch_bytes(done.graph, plan.microbatches, samples, least)
    # Where nothing is averaged, as in an evaluation, no memory is counted for it.
    averaging = request.storage.averaging_bytes if done.graph.gradients and not request.storage.gradients_on_host else 0
    exact = []
    for stage, row in enumerate(plan.forecast):
        made = optimizer_bytes(stage, row, done, in_buckets=request.storage.replicas > 1, least=least)
        exact.append(_exact(stage, row, done, held[stage], made, batch, samples))
    more = {Use.TRANSPORT: averaging}
    known = request.beyond.units
    of_stage = [[name for name, chunk in plan.units.items() if plan.placement[chunk] == r] for r in range(plan.stages)]
    forecast = tuple(
        dataclasses.replace(
            row,
            memory=row.memory + more,
            source=Source.PROFILE if known and known.issuperset(names) else Source.ESTIMATE,
        )
        for row, names in zip(exact, of_stage, strict=True)
    )
    if plan.earlier:
        pairs = zip(forecast, plan.earlier, strict=True)
        forecast = tuple(as_held(row, held, counted_only=least > 0) for row, held in pairs)
    return dataclasses.replace(plan, forecast=forecast)


def batch_bytes(graph: OpGraph, microbatches: int, samples: int, least: int = 0) -> int:
    """Returns the bytes of the batch, which is in memory over the whole step.

    Args:
        graph: one microbatch of the step.
        microbatches: per step.
        samples: samples of a microbatch, where the graph does not say their number.
        least: smaller tensors of the batch count as 0 bytes.
    """
    kinds = (kind for node in graph.nodes if node.op == ARGUMENT for kind in node.outputs)
    return sum(count for kind in kinds if (count := microbatches * kind.nbytes(samples)) >= least)


def optimizer_bytes(stage: int, row: StageForecast, done: Split, *, in_buckets: bool, least: int = 0) -> int:
    """Returns the bytes that the optimizer needs when the passes are done, besides the gradients.

    These are averages, and temporaries for the weights that it updates at a time. By then it is done with the gradients
    of others. Averages from the host are on the device in addition.

    Args:
        stage: which stage.
        row: forecast of the stage.
        done: the step, cut.
        in_buckets: whether gradients are averaged over replicas. Then updates of different buckets do not wait for each
            other, and may all be under way.
        least: smaller weights count as 0 bytes.
    """
    comes = row.gradient_bytes if row.gradients_on_host and not row.slots_on_host else 0
    dense, sparse = ([size for size in sizes if size >= least] for sizes in _updated(stage, done))
    # Rows that were touched several times are added up first, and then scaled.
    rows = _TENSORS_OF_UPDATE * max(0, row.gradient_bytes - sum(dense)) if sparse else 0
    # Without slots, only these rows of the weight are changed.
    sparse = sparse if row.slot_bytes else []
    if in_buckets:
        made = row.gradient_bytes + _TENSORS_OF_UPDATE * sum(sparse)
    elif sparse:
        made = _TENSORS_OF_UPDATE * most_at_once(dense + sparse)
    else:
        made = min(sum(dense), _TENSORS_OF_UPDATE * most_at_once(dense))
    # A copy lies in whatever piece is free, which may be nearly twice as large, and stays there.
    wider = most_at_once(sparse)
    return made + rows + _COPIES_OF_SLOTS * max(sparse, default=0) + wider + comes


def _updated(stage: int, done: Split) -> tuple[list[int], list[int]]:
    """Returns the bytes of the weights that a stage updates: those with dense and those with sparse gradients."""
    owners, graph = done.assignment.owners, done.graph
    found: tuple[list[int], list[int]] = ([], [])
    for gradient in graph.gradients:
        owner = owners[gradient.variable]
        if owner is not None and done.placement[owner] == stage:
            found[len(gradient.tensors) > 1].append(graph.variables[gradient.variable].type.nbytes(1))
    return found


def rounding_bytes(comes_and_goes: int) -> int:
    """Returns the bytes that the allocator hands out beyond what it is asked for.

    Args:
        comes_and_goes: bytes of tensors that do not stay from step to step.
    """
    return comes_and_goes // _ROUNDED_UP


def _exact(
    stage: int, row: StageForecast, done: Split, held: StepMemory, made: int, batch: int, samples: int
) -> StageForecast:
    graph = done.graph

    def nbytes(tensors: Iterable[Tensor | None]) -> int:
        return sum(graph.type_of(t).nbytes(samples) for t in tensors if t is not None)

    here = [t for t in done.transfers if done.placement[t.src_chunk] == stage]
    sent = [t for t in here if not t.once_per_step and t.tensor is not None]
    forward = [t for t in sent if t.dst_chunk > t.src_chunk]
    backward = [t for t in sent if t.dst_chunk < t.src_chunk]
    # The optimizer works when the stash is freed.
    working = batch + max(held.working, made - held.stash - held.transport)
    return dataclasses.replace(
        row.with_memory(
            {
                Use.STASH: held.stash,
                Use.TRANSPORT: held.transport,
                Use.WORK: working + held.constants + rounding_bytes(held.stash + held.transport + working),
            }
        ),
        traffic=Traffic(
            nbytes(t.tensor for t in forward), nbytes(t.tensor for t in backward), len(forward), len(backward)
        ),
    )

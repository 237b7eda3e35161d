"""A plan for a model that is not trained here: it is traced in this one process, whatever the number of partitions.

    function ──▶ model, example inputs ──▶ one microbatch, traced ──▶ plan ──▶ cut ──▶ what runs when
                 no variable has storage      (nothing is computed)

So a model larger than this machine's memory is planned in the time it takes to trace it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from smp_tf import lifecycle, planning
from smp_tf.config import Config
from smp_tf.errors import OfflinePlanError, StepError
from smp_tf.model import DistributedModel
from smp_tf.partition.cost import Costs
from smp_tf.partition.op_graph import OpGraph
from smp_tf.partition.plan import Plan
from smp_tf.partition.split import Split
from smp_tf.partition.units import Unit
from smp_tf.pipeline.executor import edges_of, plan_program
from smp_tf.pipeline.simulate import ChunkTimes, Timeline, simulate
from smp_tf.pipeline.task import Kind
from smp_tf.profiling import forward_backward, takes_training


@dataclass(frozen=True)
class Example:
    """What a function gives that describes a training.

    Args:
        model: the model.
        inputs: what it is called with: arrays, tensors or `tf.TensorSpec`s, a batch of one replica; a tuple holds
            several arguments.
        loss: of the model's outputs; None for one that makes every output count.
    """

    model: tf_keras.Model
    inputs: Any
    loss: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class OfflinePlan:
    """A plan with what it was made from.

    Args:
        plan: the plan, its forecast exact for the cut.
        graph: one microbatch of the step.
        units: what was placed, in topological order.
        costs: theirs.
        split: the step, cut.
        timeline: what runs when, by the costs.
        batch_size: samples of a batch of one replica.
    """

    plan: Plan
    graph: OpGraph
    units: tuple[Unit, ...]
    costs: Costs
    split: Split
    timeline: Timeline
    batch_size: int


def plan_offline(
    function: Callable[[], Any], config: Config, *, optimizer: str = "adam", batch_size: int | None = None
) -> OfflinePlan:
    """Plan a model over partitions that this machine need not have.

    Args:
        function: makes the model; see `example_of`.
        config: as given to `smp.init`: partitions, microbatches, pipeline, optimize and memory_limit count.
        optimizer: its name in `tf.keras.optimizers`; its slots are part of what is stored.
        batch_size: samples of a batch of one replica; None for that of the example inputs.

    Returns:
        The plan.

    Raises:
        OfflinePlanError: the function gives no model, or not what it is called with.
        PlacementError: the model has too few layers for so many partitions.
        MemoryLimitError: no plan keeps within the memory limit.

    Example:
        >>> made = plan_offline(lambda: tf_keras.applications.ResNet50(weights=None),
        ...                     load_config({"partitions": 4, "microbatches": 8}), batch_size=64)
        >>> print(render(made.plan))
    """
    lifecycle.init({"partitions": 1, "seed": 0})
    try:
        slots = slots_of(optimizer)
        model, example = _made_without_storage(function)
        samples_of_batch = batch_size if batch_size is not None else _batch_size(example)
        if samples_of_batch < config.microbatches:
            raise OfflinePlanError(
                f"A batch has at least one sample for every microbatch. Received: a batch of {samples_of_batch}, and "
                f"{config.microbatches} microbatches."
            )
        samples = -(-samples_of_batch // config.microbatches)
        graph = _traced(model, example, samples)
        request = planning.PlacementRequest(
            config.partitions or 1,
            config.microbatches,
            config.pipeline,
            config.optimize,
            slots,
            samples,
            memory_limit=config.memory_limit,
        )
        plan = planning.propose(graph, request, {})
        units, costs = planning.costs_of(graph, request)
        split = planning.cut(graph, plan)
        plan = planning.with_exact_transfers(plan, split, samples)
        timeline = _timeline(plan, units, costs, split, samples)
        return OfflinePlan(plan, graph, units, costs, split, timeline, samples_of_batch)
    finally:
        lifecycle.shutdown()


class _IsDistributedError(Exception):
    """The function has made a distributed model, which is not to be wrapped."""


def _made_without_storage(function: Callable[[], Any]) -> tuple[DistributedModel, Example]:
    made: list[Example] = []

    def build() -> tf_keras.Model:
        made.append(example_of(function()))
        if isinstance(made[0].model, DistributedModel):
            raise _IsDistributedError
        return made[0].model

    try:
        return DistributedModel(build), made[0]
    except _IsDistributedError:
        return made[0].model, made[0]


def example_of(given: Any) -> Example:
    """What a function gave: a model, `(model, inputs)` or `(model, inputs, loss)`.

    Args:
        given: the function's result. A model alone is one of Keras's functional API, which knows its inputs.

    Raises:
        OfflinePlanError: it is none of these.
    """
    model, *rest = given if isinstance(given, tuple) else (given,)
    if not isinstance(model, tf_keras.Model) or len(rest) > 2:
        what = f"a {type(given).__name__}" if not isinstance(given, tuple) else f"a tuple of {len(given)}"
        raise OfflinePlanError(
            f"The function must return a Keras model, or (model, inputs), or (model, inputs, loss). It returned {what}."
        )
    if rest:
        return Example(model, *rest)
    if not getattr(model, "inputs", None):
        raise OfflinePlanError(
            f"Model {model.name!r} does not know its inputs before it is called. Let the function return (model, "
            f"inputs), with arrays or tf.TensorSpecs of a batch."
        )
    return Example(model, tf.nest.map_structure(_spec_of_keras, model.input))


def _spec_of_keras(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def slots_of(optimizer: str) -> float:
    """How many slots an optimizer keeps for a variable, in sizes of the variable.

    Args:
        optimizer: its name in `tf.keras.optimizers`.

    Raises:
        OfflinePlanError: there is no such optimizer.
    """
    try:
        found = tf_keras.optimizers.get(optimizer)
    except ValueError:
        raise OfflinePlanError(f"tf.keras.optimizers has no optimizer of the name {optimizer!r}.") from None
    variable = tf.Variable(tf.zeros([64, 64]))
    found.build([variable])
    return sum(int(np.prod(slot.shape)) for slot in found.variables if slot.shape.rank) / (64 * 64)


def _batch_size(example: Example) -> int:
    for leaf in tf.nest.flatten(example.inputs):
        shape = tf.TensorShape(leaf.shape)
        if shape.rank and shape[0] is not None:
            return int(shape[0])
    raise OfflinePlanError("The example inputs have a batch of open size. Say how large it is (--batch-size).")


def _traced(model: DistributedModel, example: Example, samples: int) -> OpGraph:
    def zeros(leaf: Any) -> tf.Tensor:
        shape = tf.TensorShape(leaf.shape).as_list()[1:]
        if None in shape:
            raise OfflinePlanError(
                f"An input of shape {tuple(leaf.shape)} is open in more than its batch. Let the function return "
                f"(model, inputs), with arrays or tf.TensorSpecs of a batch."
            )
        return tf.zeros([samples, *shape], leaf.dtype)

    inputs = tf.nest.map_structure(zeros, example.inputs)

    options = {"training": True} if takes_training(model) else {}
    try:
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        return forward_backward(model, example.loss).trace(*arguments, **options).graph
    except StepError:
        raise
    except Exception as error:
        raise OfflinePlanError(
            f"Model {model.name!r} could not be traced with its example inputs: {type(error).__name__}: {error}"
        ) from error


def _timeline(plan: Plan, units: tuple[Unit, ...], costs: Costs, split: Split, samples: int) -> Timeline:
    stages = plan.stages_of(units)
    times = [
        ChunkTimes(
            forward=sum(c.time_forward for c, at in zip(costs.units, stages, strict=True) if at == stage),
            input_gradient=sum(c.time_backward for c, at in zip(costs.units, stages, strict=True) if at == stage),
            weight_gradient=0.0,
        )
        for stage in range(plan.stages)
    ]
    seconds: Mapping[int, float] = {
        t.index: split.graph.type_of(t.tensor).nbytes(samples) / costs.machine.link if t.tensor is not None else 0.0
        for t in split.transfers
    }
    program = plan_program(split, plan.schedule, plan.microbatches)
    return simulate(program, times, edges_of(split), comm=seconds)


def memory_over_time(made: OfflinePlan) -> list[list[tuple[float, int]]]:
    """What each rank holds, from moment to moment.

    Args:
        made: the plan.

    Returns:
        Per rank, seconds since the step's begin and the bytes held from then on; the last at the step's end.
    """
    found = []
    for row, spans in zip(made.plan.forecast, made.timeline.spans, strict=True):
        constant = row.weight_bytes + row.gradient_bytes + row.slot_bytes + row.working_bytes
        each = row.stash_bytes // max(row.in_flight, 1)
        changes = sorted(
            (span.start, each) if span.task.kind is Kind.F else (span.end, -each)
            for span in spans
            if span.task.kind in (Kind.F, Kind.B)
        )
        held, points = constant, [(0.0, constant)]
        for at, change in changes:
            held += change
            points.append((at, held))
        found.append([*points, (made.timeline.step_time, held)])
    return found

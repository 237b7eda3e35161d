"""Makes the request for a step's plan, and says what is expected of the plan that was made."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from smp_tf.announce import announce
from smp_tf.batch.results import composites_of
from smp_tf.collectives.horovod import averaging_bytes, sum_wait
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.keras.optimizer_trials import slots_of
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.plan.held_memory import HeldMemory
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.split.split import Split
from smp_tf.partition.trace.lower import Lowered
from smp_tf.pipeline import allocator
from smp_tf.pipeline.planner.beyond_estimate import by_node
from smp_tf.pipeline.planner.memory_forecast import batch_bytes
from smp_tf.pipeline.planner.plan import PROOF_SECONDS
from smp_tf.pipeline.planner.request import Aim, Course, Fixed, Hardware, Once, Outputs, PlacementRequest, Storage
from smp_tf.pipeline.planner.timeline import timeline_of
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from smp_tf.pipeline.planner.units import costs_of
from smp_tf.pipeline.run.host import has_device
from smp_tf.pipeline.schedules.schedule import is_named, placement_of
from smp_tf.planning import earlier_steps, first_steps, partition_file
from smp_tf.planning.earlier_trainings import FORMAT, EarlierTrainings, Setting, TrainingRecord, settings_of
from smp_tf.planning.kept_measurements import folder_of_measurements, subject_of, this_hardware
from smp_tf.sharding import layouts
from smp_tf.variables.fetch import WRITER
from smp_tf.variables.models import SplitModel

#: Slots per variable of an optimizer that is unknown until it is applied: as many as Adam has.
_USUAL_SLOTS = 2.0


class TracedStep(Protocol):
    """What a request for a plan needs to know of a traced step."""

    @property
    def lowered(self) -> Lowered:
        """Returns its op graph, and the objects of TensorFlow that the graph stands for."""

    @property
    def graph(self) -> OpGraph:
        """Returns its op graph in the form that is placed."""

    @property
    def models(self) -> Sequence[SplitModel]:
        """Returns the models that it calls."""


def known_slots(models: Sequence[Any]) -> float | None:
    """Returns the slots per variable of the optimizers that models were compiled with. Others are unknown yet."""
    known = [slots_of(model.optimizer) for model in _compiled(models)]
    return max((slots for slots in known if slots is not None), default=None)


def _stage_sums_of(models: Sequence[Any]) -> int:
    """Returns how often the stages put numbers together before weights change, by the optimizers that are known."""
    return max((_stage_sums(model.optimizer) for model in _compiled(models)), default=0)


def _stage_sums(optimizer: Any) -> int:
    asked = adapter.optimizers()
    if asked.scales_losses(optimizer):
        return 1 + _stage_sums(optimizer.inner_optimizer)
    return int(asked.clips_by_all(optimizer))


def request_for(
    step: str,
    traced: TracedStep,
    microbatches: int,
    samples: int,
    slots: float | None,
    local_outputs: frozenset[int],
    *,
    decides: bool,
) -> PlacementRequest:
    """Returns the request for a step's plan, by the configuration and by what was placed before.

    Args:
        step: name of the step.
        traced: trace of the step.
        microbatches: number of microbatches.
        samples: samples of the largest microbatch.
        slots: the optimizer's slots per variable; None while the optimizer is unknown.
        local_outputs: positions of outputs that stay with the stage that makes them.
        decides: whether the plan decides where variables are.
    """
    running = runtime.current()
    config, stages = running.config, running.config.partitions or 1
    lowered, graph = traced.lowered, traced.graph
    placement = earlier_steps.placement(lowered, graph.used_variables)
    given = partition_file.given_for(step, graph, is_first=placement is None) if decides else None
    schedule = _schedule_for(graph, config.pipeline)
    recompute = config.recompute
    if given is not None:
        schedule = partition_file.schedule_for(given, schedule, placement)
        placement, recompute = given.placement, partition_file.recompute_for(given, recompute)
    placement = placement or earlier_steps.first_placement(config, stages)
    if placement is None and not is_named(config.pipeline):
        placement = placement_of(config.pipeline, stages)
    ranks = dataclasses.replace(Ranks.alike(stages, config.memory_limit), hosts=running.topology.hosts_of_stages())
    request = PlacementRequest(
        Course(
            schedule,
            stages,
            microbatches,
            samples,
            chunks_per_rank=config.chunks_per_rank,
            placement=placement,
            contiguous=config.contiguous,
            recompute=recompute,
        ),
        Storage(
            _USUAL_SLOTS if slots is None else slots,
            slot_shares=layouts.count(),
            replicas=running.topology.replicas,
            averaging_bytes=averaging_bytes(running.topology.replicas),
            gradients_on_host=config.gradient_offload and has_device(),
            slots_on_host=config.optimizer_offload and has_device(),
        ),
        Aim(config.optimize, config.balance_tolerance, proof_seconds=PROOF_SECONDS),
        _times_of(traced.models, samples),
        Hardware(ranks),
        Fixed(None if config.auto_partition else config.default_partition, given),
        Outputs(local_outputs, composites_of(lowered.results)),
        Once(config.check_inputs, _stage_sums_of(traced.models), config.xla, sum_wait()),
    )
    return request.changed(
        beyond=by_node(graph, _beyond_of(traced.models, samples, decides=decides)),
        held=_held_in_earlier_trainings(traced, samples) if decides else {},
    )


def setting_of(traced: TracedStep, samples: int) -> Setting:
    """Returns what decides, besides the placement, what the ranks of a training hold.

    Args:
        traced: trace of the step.
        samples: samples of the largest microbatch.
    """
    running = runtime.current()
    topology = running.topology
    optimizers = [model.optimizer for model in _compiled(traced.models)]
    return Setting(
        subject_of(traced.graph, samples),
        this_hardware(topology.local_size),
        {
            **settings_of(running.config, topology.replicas, optimizers),
            "counted_from": str(allocator.counted_from()),
        },
    )


def _compiled(models: Sequence[Any]) -> list[Any]:
    """Returns the models that have an optimizer."""
    return [model for model in models if getattr(model, "optimizer", None) is not None]


def _held_in_earlier_trainings(traced: TracedStep, samples: int) -> Mapping[str, tuple[HeldMemory, ...]]:
    """Returns what ranks held in earlier trainings, by their placement. Only the rank that makes plans knows it."""
    topology, kept = runtime.current().topology, EarlierTrainings()
    if topology.rank != WRITER or topology.stages == 1 or not traced.graph.gradients or kept.is_empty:
        return {}
    found = kept.find(setting_of(traced, samples))
    if kept.trouble:
        announce(kept.trouble, topology.rank)
    return found


def expected_of(
    step: str, traced: TracedStep, request: PlacementRequest, plan: Plan, cut: Split, counted: tuple[int, ...]
) -> first_steps.Expected:
    """Returns what is expected of a step: its time by the costs of its units, and what the allocator will count.

    Args:
        step: name of the step.
        traced: trace of the step.
        request: the request for its plan.
        plan: the plan.
        cut: the step, cut by the plan.
        counted: the bytes of each stage's forecast that the allocator counts; () where it counts all.
    """
    graph = traced.graph
    timeline = timeline_of(plan, *costs_of(graph, request, plan), cut, request)
    record, samples = None, request.course.samples
    if folder_of_measurements() is not None:
        record = TrainingRecord(FORMAT, step, setting_of(traced, samples), plan.placement_key)
    batch = batch_bytes(graph, plan.microbatches, samples, allocator.counted_from())
    return first_steps.Expected(timeline.step_time, bool(request.times.seconds), counted, record, batch)


def _schedule_for(graph: OpGraph, asked: str) -> str:
    """Returns the schedule of a step. A written schedule is for one number of microbatches, and for training only."""
    return asked if is_named(asked) or any(node.backward for node in graph.nodes) else "simple"


def _times_of(models: Sequence[SplitModel], samples: int) -> UnitTimes:
    """Returns the measured times of the units of models, for microbatches of a number of samples."""
    measured = {
        name: (forward * samples, backward * samples)
        for model in models
        for name, (forward, backward) in model._smp_store.measured.items()
    }
    stores = [model._smp_store for model in models if model._smp_store.measured]
    message = next((store.message for store in stores if store.message is not None), None)
    return UnitTimes(measured, alone=_mean_of([store.alone for store in stores]), message=message)


def _beyond_of(models: Sequence[SplitModel], samples: int, *, decides: bool) -> dict[str, tuple[int, int]]:
    """Returns how many more bytes units need than is estimated, of models that were measured with as many samples."""
    found: dict[str, tuple[int, int]] = {}
    for store in (model._smp_store for model in models):
        if store.beyond_samples == samples:
            found |= store.beyond
        elif store.beyond and decides:
            announce(
                f"The memory of model {store.model_name!r} was measured for {store.beyond_samples} samples, and its "
                f"microbatches have {samples}, so it is estimated. Give model.profile as many as a microbatch has.",
                runtime.current().topology.rank,
            )
    return found


def _mean_of(shares: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the share of its time that a unit takes alone, by those of the step's models that were measured."""
    if not shares:
        return 1.0, 1.0
    forward, backward = zip(*shares, strict=True)
    return statistics.fmean(forward), statistics.fmean(backward)

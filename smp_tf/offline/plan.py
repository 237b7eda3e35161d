"""Plans for a model that is not trained here. It is traced in this one process, for any number of partitions.

    function ──▶ model, example inputs ──▶ one microbatch, traced ──▶ plan ──▶ cut ──▶ what runs when
                 no variable has storage      (nothing is computed)

So a model larger than this machine's memory is planned in the time that its trace takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.collectives.horovod import averaging_bytes, sum_wait
from smp_tf.config.config import Config
from smp_tf.config.keys import ONE_BIT
from smp_tf.config.values import kind_of
from smp_tf.errors import OfflinePlanError, PlacementError, ScheduleError, StepError
from smp_tf.model.model import DistributedModel
from smp_tf.model.profiling import forward_backward, takes_training
from smp_tf.offline.cluster import Cluster, one_host
from smp_tf.offline.example import Example, batch_size_of, example_of
from smp_tf.offline.numbers import counted
from smp_tf.offline.optimizers import optimizer_by_name, slots_by_name
from smp_tf.offline.user_errors import first_of, in_a_line, told
from smp_tf.optimizer.one_bit import OneBitOptimizer
from smp_tf.partition.graph.fingerprint import fingerprint
from smp_tf.partition.graph.op_graph import OpGraph, TensorType
from smp_tf.partition.plan.plan import Plan, as_bytes
from smp_tf.partition.plan.plan_file import PlanFile, StoredPlan
from smp_tf.partition.split.split import Split
from smp_tf.partition.units.cost import Costs
from smp_tf.partition.units.units import Unit
from smp_tf.pipeline.measure.made_up import numbers
from smp_tf.pipeline.planner import memory_forecast, proposal
from smp_tf.pipeline.planner.beyond_estimate import beyond_estimate, by_node
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.plan import PROOF_SECONDS
from smp_tf.pipeline.planner.request import Aim, Course, Fixed, Hardware, Once, PlacementRequest, Storage
from smp_tf.pipeline.planner.timeline import timeline_of
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from smp_tf.pipeline.planner.unit_peaks import BeyondEstimate
from smp_tf.pipeline.planner.units import costs_of, units_of
from smp_tf.pipeline.programs.kinds import KINDS, Holds
from smp_tf.pipeline.programs.simulate import SimulatedStep
from smp_tf.pipeline.programs.step_memory import memory_over_step
from smp_tf.pipeline.schedules.schedule import is_named, runs_on
from smp_tf.planning.host_memory import memory_of_host
from smp_tf.replicas.one_bit_errors import errors_per_weight
from smp_tf.start import lifecycle
from smp_tf.steps.trace import StepTrace

#: The name of the step of an offline plan, in a plan file.
STEP = "forward_backward"
#: How many seconds smaller microbatches, or more partitions, are tried where a model does not fit.
_SECONDS_TO_TRY = 10.0
#: The seconds of a step without times, where no layer could be measured.
_SHORTEST = 1e-9
#: The largest part of the host's memory for an example input. There may be several, and other programs.
_PART_OF_MEMORY = 4


@dataclass(frozen=True)
class OfflineTrace:
    """A model, traced for one microbatch without storage for its variables.

    Args:
        model: its name.
        traced: the trace of a step that takes the model's inputs and returns the gradients of its loss.
        tensors: the inputs of a microbatch.
        samples: samples of a microbatch.
        batch_size: samples of a batch of one replica.
    """

    model: str
    traced: StepTrace
    tensors: tuple[tf.Tensor, ...]
    samples: int
    batch_size: int

    @property
    def graph(self) -> OpGraph:
        """Returns the op graph of one microbatch."""
        return self.traced.graph


@dataclass(frozen=True)
class AveragingTime:
    """How gradients are averaged.

    Args:
        replicas: number of replicas that train at the same time, each on its own batches.
        seconds: for each stage, the seconds to average gradients over the replicas.
    """

    replicas: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class OfflinePlan:
    """A plan, with what it was made from.

    Args:
        plan: the plan, with a forecast that is exact for the cut.
        trace: the model, traced for one microbatch.
        units: the units that were placed, in topological order.
        costs: costs of the units.
        split: the step, cut.
        timeline: what runs when, by the costs.
        times: measured times of the units.
        averaging: over how many replicas gradients are averaged, and how long this takes.
    """

    plan: Plan
    trace: OfflineTrace
    units: tuple[Unit, ...]
    costs: Costs
    split: Split
    timeline: SimulatedStep
    times: UnitTimes
    averaging: AveragingTime

    @property
    def graph(self) -> OpGraph:
        """Returns the op graph of one microbatch."""
        return self.trace.graph

    @property
    def batch_size(self) -> int:
        """Returns the samples of a batch of one replica."""
        return self.trace.batch_size

    @property
    def beyond(self) -> BeyondEstimate:
        """Returns how many more bytes units need than is estimated, as was measured."""
        return by_node(self.graph, beyond_estimate(self.graph, self.times.peaks, self.trace.samples))

    @property
    def is_measured(self) -> bool:
        """Returns whether the times of the costs were measured, at least in part."""
        return bool(self.times.seconds)

    @property
    def measured_sizes(self) -> tuple[int, ...]:
        """Returns the samples of the measured microbatches, where times are estimated from other sizes."""
        return self.times.sizes

    @property
    def replicas(self) -> int:
        """Returns the number of replicas that train at the same time, each on its own batches."""
        return self.averaging.replicas

    @property
    def reduce_seconds(self) -> tuple[float, ...]:
        """Returns, for each stage, the seconds to average gradients over the replicas."""
        return self.averaging.seconds

    @property
    def step_seconds(self) -> float:
        """Returns the seconds of a whole step, until the gradients of all stages are averaged."""
        return self.timeline.step_time

    @property
    def samples_per_second(self) -> float:
        """Returns the samples per second that all replicas together train on."""
        return self.replicas * self.batch_size / max(self.step_seconds, _SHORTEST)


class OfflineModel:
    """A model that is planned, perhaps for several settings. It is traced once for each size of a microbatch.

    Args:
        function: makes the model. `example_of` says what it may return.
        optimizer: name of the optimizer in `tf.keras.optimizers` or of smp_tf's. Its slots are part of what is stored.
        batch_size: samples of a batch of one replica; None for that of the example inputs.
        times: returns the measured times for this model and the samples of a microbatch.

    Raises:
        OfflinePlanError: the function gives no model, or there is no such optimizer.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        *,
        optimizer: str = "adam",
        batch_size: int | None = None,
        times: Callable[[OfflineModel, int], UnitTimes] = lambda model, samples: UnitTimes(),
    ) -> None:
        self._slots = slots_by_name(optimizer)
        self._is_one_bit = isinstance(optimizer_by_name(optimizer), OneBitOptimizer)
        self._model, self._example = made_without_storage(function)
        self.batch_size = batch_size if batch_size is not None else batch_size_of(self._example)
        self._times = times
        self._traces: dict[int, OfflineTrace] = {}
        self._measured: dict[int, UnitTimes] = {}

    def samples_of(self, microbatches: int) -> int:
        """Returns the samples of the largest microbatch.

        Args:
            microbatches: number of microbatches a batch is cut into.

        Raises:
            OfflinePlanError: the batch has fewer samples.
        """
        if self.batch_size < microbatches:
            raise OfflinePlanError(
                f"A batch has at least one sample for every microbatch. Received: a batch of {self.batch_size}, and "
                f"{microbatches} microbatches."
            )
        return -(-self.batch_size // microbatches)

    def trace(self, microbatches: int) -> OfflineTrace:
        """Returns the largest microbatch, forward and backward.

        Args:
            microbatches: number of microbatches a batch is cut into.

        Raises:
            OfflinePlanError: the model cannot be called with its inputs, or the batch has fewer samples.
        """
        return self.trace_of(self.samples_of(microbatches))

    def trace_of(self, samples: int) -> OfflineTrace:
        """Returns a microbatch of a size, forward and backward.

        Args:
            samples: samples of the microbatch. They may be more than a batch has.

        Raises:
            OfflinePlanError: the model cannot be called with its inputs.
        """
        if samples not in self._traces:
            traced, tensors = traced_microbatch(self._model, self._example, samples)
            try:
                units_of(traced.graph)
            except PlacementError:
                raise OfflinePlanError(
                    f"Model {self._model.name!r} has no layer that computes anything, so there is nothing to place."
                ) from None
            self._traces[samples] = OfflineTrace(self._model.name, traced, tensors, samples, self.batch_size)
        return self._traces[samples]

    def _errors(self, config: Config, replicas: int) -> float:
        """Returns what an optimizer keeps for errors, besides its slots, in sizes of the weights."""
        sends = self._is_one_bit and config.gradient_compression == ONE_BIT and replicas > 1
        return errors_per_weight(replicas) if sends else 0.0

    def plan(
        self,
        config: Config,
        *,
        replicas: int = 1,
        cluster: Cluster | None = None,
        proof_seconds: float = PROOF_SECONDS,
        advise: bool = True,
        timed: bool = True,
        stored: PlanFile | None = None,
        processes: int | None = None,
    ) -> OfflinePlan:
        """Returns the plan for some settings.

        Args:
            config: the configuration, as for `smp.init`. Only keys for how stages are made and what they store count.
            replicas: number of replicas.
            cluster: the cluster that they run on; None for processes like this one, on one host.
            proof_seconds: how many seconds to search for a better placement, or a proof that there is none.
            advise: whether to search for settings that fit, where these do not.
            timed: whether to use what was measured of units, where there is anything.
            stored: plans of a file. The one for this model is used instead of making a plan.
            processes: how many processes advice may use; None for all of the cluster, or any number.

        Raises:
            OfflinePlanError: the model cannot be called with its inputs, the batch has fewer samples, or the plans of
                the file are not of this model.
            PlacementError: the model has too few layers for so many partitions.
            MemoryLimitError: no plan keeps within the memory limit.
            ConfigError: the cluster has too few ranks, or 1-bit compression excludes another setting.
        """
        if config.gradient_compression == ONE_BIT and replicas > 1:
            config.refuse_beside_one_bit()
        made, stages = self.trace(config.microbatches), config.partitions or 1
        described, cluster = cluster, cluster or one_host(stages * replicas)
        measured = self._times_of(made.samples) if timed else UnitTimes()
        given = _given_for(stored, made.graph, config.pipeline) if stored is not None else None
        request = PlacementRequest(
            _course(config, made.samples, given),
            self._storage(config, replicas),
            Aim(
                config.optimize,
                config.balance_tolerance,
                proof_seconds=proof_seconds,
                thorough=True,
                advise=advise,
                others=lambda: self._smaller_microbatches(config, replicas, cluster, stored),
                more_partitions=lambda numbers: self._more_partitions(numbers, config, replicas, described, processes),
            ),
            measured,
            Hardware(cluster.stages(stages, replicas).within(config.memory_limit), cluster.machine),
            Fixed(given=given),
            once=Once(config.check_inputs, is_compiled=config.xla, sum_wait=sum_wait()),
            beyond=by_node(made.graph, beyond_estimate(made.graph, measured.peaks, made.samples)),
        )
        plan = proposal.propose(made.graph, request, {})
        units, costs = costs_of(made.graph, request, plan)
        split = cut(made.graph, plan)
        plan = memory_forecast.with_exact_transfers(plan, split, request)
        reduce_seconds = cluster.reduce_seconds(stages, replicas, [row.gradient_bytes for row in plan.forecast])
        return OfflinePlan(
            plan,
            made,
            units,
            costs,
            split,
            timeline_of(plan, units, costs, split, request),
            measured,
            AveragingTime(replicas, reduce_seconds),
        )

    def _storage(self, config: Config, replicas: int) -> Storage:
        """Returns what ranks store besides weights and activations."""
        return Storage(
            self._slots + self._errors(config, replicas),
            slot_shares=replicas if config.shard_optimizer_state or config.optimizer_offload else 1,
            replicas=replicas,
            averaging_bytes=averaging_bytes(replicas),
            gradients_on_host=config.gradient_offload or config.optimizer_offload,
            slots_on_host=config.optimizer_offload,
        )

    def _smaller_microbatches(
        self, config: Config, replicas: int, cluster: Cluster, stored: PlanFile | None
    ) -> Iterator[str]:
        """Yields the first larger number of microbatches with which the model fits, if one is found soon."""
        begun, many = time.monotonic(), config.microbatches
        while is_named(config.pipeline) and time.monotonic() - begun < _SECONDS_TO_TRY:
            many *= 2
            if many > self.batch_size:
                return
            if self._fits(dataclasses.replace(config, microbatches=many), replicas, cluster, stored):
                yield f"{many} microbatches"
                return

    def _more_partitions(
        self, numbers: Iterable[int], config: Config, replicas: int, cluster: Cluster | None, processes: int | None
    ) -> Iterator[str]:
        """Yields the first larger number of partitions with which the model fits, with fewer replicas if needed.

        A cluster has no more ranks. Where only a number of processes is given, there may be more.
        """
        begun = time.monotonic()
        most = processes if processes is not None or cluster is None else cluster.size
        for many in numbers:
            fewer = replicas if most is None else max(1, min(replicas, most // many))
            is_more = most is not None and many * fewer > most
            is_late = time.monotonic() - begun > _SECONDS_TO_TRY
            if is_late or (cluster is not None and many * fewer > cluster.size):
                return
            if self._fits(dataclasses.replace(config, partitions=many), fewer, cluster or one_host(many * fewer)):
                beside = f" and {counted(fewer, 'replica')}" if fewer != replicas else ""
                yield f"{many} partitions{beside}{f', on {many * fewer} ranks' if is_more else ''}"
                return

    def _fits(self, config: Config, replicas: int, cluster: Cluster, stored: PlanFile | None = None) -> bool:
        """Returns whether there is a plan. There is none where the model cannot be called with so few samples."""
        options: dict[str, Any] = {"proof_seconds": 0.0, "advise": False, "timed": False, "stored": stored}
        try:
            self.plan(config, replicas=replicas, cluster=cluster, **options)
        except (PlacementError, OfflinePlanError, ScheduleError, StepError):
            return False
        return True

    def _times_of(self, samples: int) -> UnitTimes:
        """Returns the measured times for microbatches of a size, which it looks up once."""
        if samples not in self._measured:
            self._measured[samples] = self._times(self, samples)
        return self._measured[samples]


def _course(config: Config, samples: int, given: StoredPlan | None) -> Course:
    """Returns the course of a step through its stages, by its settings and the plan of a file."""
    return Course(
        config.pipeline,
        config.partitions or 1,
        config.microbatches,
        samples,
        chunks_per_rank=config.chunks_per_rank,
        placement=given.placement if given is not None else None,
        contiguous=config.contiguous,
        recompute=config.recompute or (given is not None and given.recompute),
    )


def _given_for(stored: PlanFile, graph: OpGraph, schedule: str) -> StoredPlan:
    """Returns the file's plan for a model.

    Raises:
        OfflinePlanError: there is no such plan, or the schedule does not run on its chunks.
    """
    try:
        found = stored.plan_for(STEP, graph, units_of(graph), fingerprint(graph))
    except PlacementError as error:
        raise OfflinePlanError(f"The plan of the file cannot be used. {error}") from error
    if not runs_on(schedule, found.placement):
        raise OfflinePlanError(
            f"The plan of the file was made for pipeline {found.pipeline!r} and has chunks on partitions "
            f"{list(found.placement)}, on which {schedule!r} does not run."
        )
    return found


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Runs smp_tf for models that are planned and not trained."""
    lifecycle.init({"partitions": 1, "seed": 0})
    try:
        yield
    finally:
        lifecycle.shutdown()


class _IsDistributedError(Exception):
    """The function has made a distributed model, which must not be wrapped again."""


def made_without_storage(function: Callable[[], Any]) -> tuple[DistributedModel, Example]:
    """Returns the model that a function makes, without storage for its variables, and what else the function gives.

    Args:
        function: `example_of` says what it may return. A distributed model is taken as it is.

    Raises:
        OfflinePlanError: the function gives no model.
    """
    made: list[Example] = []

    def build() -> Any:
        made.append(example_of(function()))
        if isinstance(made[0].model, DistributedModel):
            raise _IsDistributedError
        return made[0].model

    try:
        return DistributedModel(build), made[0]
    except _IsDistributedError:
        return made[0].model, made[0]


def traced_microbatch(
    model: DistributedModel, example: Example, samples: int
) -> tuple[StepTrace, tuple[tf.Tensor, ...]]:
    """Traces a microbatch, forward and backward, and returns the trace and the microbatch.

    Args:
        model: the model.
        example: its inputs, and perhaps its loss.
        samples: samples of the microbatch.

    Raises:
        OfflinePlanError: the model cannot be called with its inputs.
    """

    def value(leaf: Any) -> tf.Tensor:
        if isinstance(leaf, np.ndarray | tf.Tensor) and len(leaf.shape) and leaf.shape[0] >= samples:
            return tf.convert_to_tensor(leaf[:samples])
        shape = tf.TensorShape(leaf.shape).as_list()[1:]
        if None in shape:
            raise OfflinePlanError(
                f"An input of shape {tuple(leaf.shape)} is open in more than its batch. Let the function return "
                f"(model, inputs), with arrays or tf.TensorSpecs of a batch."
            )
        kind = TensorType(tf.dtypes.as_dtype(leaf.dtype).name, (samples, *shape))
        if kind.nbytes(1) > memory_of_host() // _PART_OF_MEMORY:
            raise OfflinePlanError(
                f"Models are traced with a microbatch in memory. One input of {samples:,} samples takes "
                f"{as_bytes(kind.nbytes(1), up=True)}, and this host has {as_bytes(memory_of_host())}: plan for "
                f"smaller batches, or more microbatches."
            )
        return numbers(kind) if tf.dtypes.as_dtype(leaf.dtype).is_floating else tf.zeros(kind.shape, kind.dtype)

    inputs = tf.nest.map_structure(value, example.inputs)
    tensors = tuple(tf.nest.flatten(inputs, expand_composites=True))

    options = {"training": True} if takes_training(model) else {}
    loss = _Loss(example.loss) if example.loss is not None else None
    try:
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        function = forward_backward(model, loss.checked if loss is not None else None)
        return function.trace(*arguments, **options), tensors
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        first = first_of(error)
        if isinstance(first, StepError | OfflinePlanError):
            raise type(first)(in_a_line(str(first))) from error
        if isinstance(first, SystemExit):
            raise OfflinePlanError(f"Model {model.name!r} ends the process (sys.exit) when it is called.") from error
        what = loss.what_failed(model.name) if loss is not None else ""
        what = what or f"Model {model.name!r} could not be traced with its example inputs"
        place = told(error)
        raise OfflinePlanError(f"{what}{',' if place.startswith(' ') else ''}{place}") from error


class _Loss:
    """A loss that knows how far a trace has come.

    Args:
        loss: the loss of the model's outputs.
    """

    def __init__(self, loss: Callable[[Any], Any]) -> None:
        self._loss = loss
        self._begun = self._done = False

    def checked(self, outputs: Any) -> Any:
        """Returns the loss of some outputs, and checks that it has gradients.

        Raises:
            OfflinePlanError: it is no loss.
        """
        self._begun = True
        found = self._loss(outputs)
        leaves = tf.nest.flatten(found)
        if not leaves or not all(tf.is_tensor(leaf) and leaf.dtype.is_floating for leaf in leaves):
            what = f"a tensor of {found.dtype.name}" if tf.is_tensor(found) else kind_of(found)
            raise OfflinePlanError(f"The loss must return a tensor of floating-point numbers. It returned {what}.")
        self._done = True
        return found

    def what_failed(self, model: str) -> str:
        """Returns words for where a trace failed, to follow the words for the model."""
        if self._done:
            return f"The gradients of model {model!r} could not be traced"
        return f"The loss of model {model!r} could not be traced with its outputs" if self._begun else ""


def memory_over_time(made: OfflinePlan) -> list[list[tuple[float, int]]]:
    """Returns what each rank holds on its device from moment to moment, by the plan's timeline.

    Args:
        made: the plan.

    Returns:
        For each rank, seconds since the step's begin and the bytes held from then on. The last entry is at the step's
        end. While weights are updated, the optimizer needs memory, too. The plan's forecast is made from other times,
        which all ranks know. So what is in flight at the fullest moment may differ.
    """
    samples = -(-made.batch_size // made.plan.microbatches)
    batch = memory_forecast.batch_bytes(made.graph, made.plan.microbatches, samples)
    averaging = averaging_bytes(made.replicas) if made.graph.gradients else 0
    found = []
    over_step = memory_over_step(made.split, made.timeline, samples, made.beyond.nodes)
    for stage, (row, moments) in enumerate(zip(made.plan.forecast, over_step, strict=True)):
        stored = row.weight_bytes + row.gradient_bytes + row.slot_bytes - row.host_bytes
        stored += 0 if row.gradients_on_host else averaging
        stored += next((moment.constants for _, moment in moments), 0)

        def held(nbytes: int, stored: int = stored) -> int:
            return stored + batch + nbytes + memory_forecast.rounding_bytes(batch + nbytes)

        updates = [span for span in made.timeline.spans[stage] if KINDS[span.task.kind].holds is Holds.UPDATE]
        updating = held(memory_forecast.optimizer_bytes(stage, row, made.split, in_buckets=made.replicas > 1))
        found.append(
            [
                (0.0, held(0)),
                *((at, held(moment.total)) for at, moment in moments),
                *([(updates[0].start, updating), (updates[-1].end, held(0))] if updates else []),
                (made.timeline.step_time, held(0)),
            ]
        )
    return found

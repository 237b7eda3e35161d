"""A step that is split. Called with a batch, it runs this rank's program and returns the step's outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf.batch.cut_batch import CutBatch
from smp_tf.batch.microbatch_errors import tell_of_microbatches
from smp_tf.batch.microbatches import Slicer, SplitArgument, sizes_of
from smp_tf.checkpoint import pending
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.trace.lower import OutputSlot
from smp_tf.pipeline.programs.kinds import WEIGH
from smp_tf.pipeline.run.emission import CallersPart, SumSparse
from smp_tf.pipeline.run.executor import LastTasks, StepResults, emit
from smp_tf.pipeline.run.marks import begin_reduce, end_reduce
from smp_tf.pipeline.run.reduction import Bucket
from smp_tf.pipeline.run.stage_program import StageProgram
from smp_tf.planning import first_steps
from smp_tf.recording import record as recording
from smp_tf.replicas.gradient_marks import Computed
from smp_tf.replicas.sparse_sums import own_weighted_sum, weighted_sum
from smp_tf.replicas.sums import reduction_name, sum_over_replicas
from smp_tf.steps import free_memory
from smp_tf.steps.input_check import add_input_check
from smp_tf.steps.outputs import DescribedOutputs, FlatOutputs, packed
from smp_tf.steps.replica_check import ReplicaCheck
from smp_tf.steps.sequel import Sequel
from smp_tf.steps.sums_in_steps import call_number
from smp_tf.tf_internals import named, op_by_op
from smp_tf.variables import step_seeds


@dataclass(frozen=True, eq=False)
class Source:
    """What is left of the trace that a program was made from, whose graphs are much larger than the program.

    Args:
        key: what tells the trace from all others.
        captures: the tensors from outside that it takes.
        structure: what the step function returned, with an `OutputSlot` in place of every tensor.
        is_random: whether its random ops need seeds.
        ahead_of: the step function whose next step's random numbers it draws, by what that is known by; None where
            it draws its own.
    """

    key: object
    captures: Sequence[tf.Tensor]
    structure: Any
    is_random: bool
    ahead_of: str | None = None


@dataclass(frozen=True, eq=False)
class Results:
    """What becomes of a step's results.

    Args:
        outputs: what is known of them.
        then: what comes after the step in the same graph; the program gives what it returns. None: nothing.
    """

    outputs: DescribedOutputs
    then: Sequel | None = None


@dataclass(repr=False, eq=False)
class SplitProgram:
    """A step made ready for one signature: this rank's program and what is needed to call it.

    Args:
        name: name of the step function.
        known_as: what the step function is known by, on all ranks: such as "train/0".
        source: what the program was made from.
        batch: how its batch is cut.
        stage_program: what this rank runs.
        plan: the plan by which the step was cut.
        returned: what becomes of its results.
        expected: how long a step should take by its plan, where that is to be told.
    """

    name: str
    known_as: str
    source: Source
    batch: CutBatch
    stage_program: StageProgram
    plan: Plan
    returned: Results
    expected: first_steps.Expected | None = None
    _eager: Any = field(default=None, init=False)
    _layout: FlatOutputs | None = field(default=None, init=False)

    @property
    def key(self) -> object:
        """What tells the trace that it was made from from all others."""
        return self.source.key

    @property
    def structure(self) -> Any:
        """What the step function returns, with an `OutputSlot` in place of every tensor."""
        return self.source.structure

    @property
    def arguments(self) -> tuple[SplitArgument, ...]:
        """How the step's tensor arguments are cut."""
        return self.batch.arguments

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.batch.microbatches

    def __call__(self, tensors: Sequence[Any]) -> Any:
        """Runs the step in the graph that is being traced or, if it is called eagerly, as its own `tf.function`.

        Args:
            tensors: tensor arguments of the whole batch. Composite ones are whole.

        Returns:
            The structure that the step function returns, with a `StepOutput` in place of every tensor; or what `then`
            makes of it.
        """
        if tf.config.functions_run_eagerly():
            raise StepError(
                f"Step {self.name!r} is cut and pipelined as a graph, and cannot run op by op. Switch "
                f"tf.config.run_functions_eagerly off around it; to debug its body, use tf.print in it."
            )
        if not tf.executing_eagerly():
            return self._finish(tensors)
        if self._eager is None:
            signature = [argument.spec for argument in self.arguments]
            emitter = named(self._emit_tensors, f"{self.name}_{self.stage_program.number}")
            self._eager = tf.function(emitter, autograph=False, input_signature=signature)
        with self.telling_of_microbatches(tensors):
            flat = self._eager(*tensors)
        if self.returned.then is not None:
            return flat
        assert self._layout is not None
        return self.returned.outputs.filled(self._layout.filled(flat))

    def __repr__(self) -> str:
        return f"<SplitProgram of step {self.name!r}>"

    @contextlib.contextmanager
    def telling_of_microbatches(self, tensors: Sequence[Any]) -> Iterator[None]:
        """Adds to errors about shapes within its context, in which it runs, that the step has a microbatch.

        Args:
            tensors: tensor arguments of the whole batch.
        """
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if self.microbatches > 1:
                tell_of_microbatches(error, f"Step {self.name!r} runs on", self._sizes(tensors))
            raise

    def _sizes(self, tensors: Sequence[Any]) -> tuple[int, ...]:
        """Returns the number of samples in each microbatch; nothing where the arguments do not say it."""
        for argument, tensor in zip(self.arguments, tensors, strict=True):
            if argument.axis is not None and isinstance(tensor, tf.Tensor):
                return sizes_of(int(tensor.shape[argument.axis]), self.microbatches)
        return ()

    def _finish(self, tensors: Sequence[Any]) -> Any:
        """Writes the program into the current graph, and what comes after it."""
        flat, emitted = self._emit(tensors)
        results = self.returned.outputs.filled(flat)
        if self.returned.then is None:
            return results
        return self.returned.then(results, tensors, LastTasks(emitted))

    def _emit_tensors(self, *tensors: Any) -> Any:
        if self.returned.then is not None:
            return self._finish(tensors)
        self._layout, _ = self._emit(tensors)
        return self._layout.tensors()

    @op_by_op()
    def _emit(self, tensors: Sequence[Any]) -> tuple[FlatOutputs, StepResults]:
        """Writes the program into the current graph, up to the update of weights."""
        running = runtime.current()
        program = self.stage_program
        slicer = Slicer(self.arguments, tensors, self.microbatches)
        replicas = running.topology.replicas
        sizes = slicer.sizes
        weights: Sequence[Any] = list(sizes) if program.sums.is_weighted else [1] * len(sizes)
        pending.add_check()
        # Masks depend on the replica, the step and the microbatch, but never on the number of partitions.
        seed = self._seeds(running.topology.replica) if self.source.is_random else _no_seed
        recording.know(self)
        weighs = any(task.kind is WEIGH for task in program.tasks)
        told = _ToldReplicas(self, tensors, _total(weights)) if weighs else None

        def check(step: tf.Tensor) -> None:
            add_input_check(self.name, self.arguments, tensors, step, program.number, program.end.ranks, program.stage)

        sparse: dict[int, tf.Tensor] = {}
        results = emit(
            program,
            slicer,
            self.source.captures,
            seed,
            weights,
            CallersPart(
                told.write if told is not None else None,
                check,
                self._sparse_sums(weights, sparse),
                lambda step: call_number(self.known_as, step),
            ),
        )
        if any(output.is_gradient for output in program.split.outputs):
            first_steps.watch(program.number, self.plan, self.expected)
            free_memory.return_after_first_steps(program.number)
        accumulated, total = results.accumulated, _total(weights)
        if told is not None:
            # A replica's sum is multiplied by its share of the weight, so that the plain mean over the replicas is
            # right.
            total = told.total / replicas if program.reduction is None else told.total
            self._add_sparse(accumulated, results, weights, sparse)
        computed = {
            position: Computed(results.computed, results.buckets.get(position))
            for position, tensor in enumerate(accumulated)
            if tensor is not None
        }
        return FlatOutputs(results.values, accumulated, weights, total, computed), results

    def _seeds(self, replica: int) -> step_seeds.StepSeeds:
        """Returns the seeds of the microbatches of the step that begins, or of the step that comes after this one."""
        if self.source.ahead_of is not None:
            return step_seeds.coming_seeds(self.source.ahead_of, replica)
        return step_seeds.next_seeds(self.known_as, replica)

    def _sparse_sums(self, weights: Sequence[Any], found: dict[int, tf.Tensor]) -> SumSparse:
        """Returns what writes the sum of a sparse gradient over all replicas; its parts go into a mapping."""
        program, name = self.stage_program, reduction_name(self.known_as)
        slots = {s.outputs: s for s in tf.nest.flatten(self.structure) if isinstance(s, OutputSlot)}

        def write(bucket: Bucket, values: Sequence[list[tf.Tensor]], step: tf.Tensor) -> None:
            where = step, program.number, program.stage
            parts = packed(slots[bucket.positions], values)
            assert parts is not None
            begun = begin_reduce(*where, tf.nest.flatten(parts, expand_composites=True), bucket.number)
            sparse = weighted_sum(parts, weights, f"{name}_sparse_{bucket.positions[0]}")
            summed = tf.nest.flatten(sparse, expand_composites=True)
            end_reduce(begun, *where, summed, bucket.number)
            found.update(zip(bucket.positions, summed, strict=True))

        return write

    def _add_sparse(
        self, accumulated: list[Any], results: StepResults, weights: Sequence[Any], over_replicas: Mapping[int, Any]
    ) -> None:
        """Puts the sums of sparse gradients, over all replicas or of this one, among the others, part by part."""
        program = self.stage_program
        for slot in tf.nest.flatten(self.structure):
            if isinstance(slot, OutputSlot) and isinstance(slot.spec, tf.IndexedSlicesSpec):
                parts = packed(slot, [results.values[i] for i in slot.outputs])
                if parts is None or not program.split.outputs[slot.outputs[0]].is_gradient:
                    continue
                summed = [over_replicas[i] for i in slot.outputs] if program.reduction is not None else []
                if program.reduction is None:
                    summed = tf.nest.flatten(own_weighted_sum(parts, weights), expand_composites=True)
                for i, tensor in zip(slot.outputs, summed, strict=True):
                    accumulated[i] = tensor


class _ToldReplicas:
    """What the replicas tell each other in a step besides their gradients: the weights of these, and hashes.

    Args:
        program: the step.
        tensors: arguments of the step.
        weight: weight of this replica's gradients.
    """

    def __init__(self, program: SplitProgram, tensors: Sequence[Any], weight: Any) -> None:
        self._program = program
        self._tensors = tensors
        self._weight = weight
        #: The weight of the gradients of all replicas, once it is written down.
        self.total: tf.Tensor

    def write(self, step: tf.Tensor) -> list[tf.Operation]:
        """Writes down, next to the pipeline, what is told; the step ends after it, and no weight changes before."""
        check = self._check(step)
        name = reduction_name(self._program.known_as)
        weight = tf.reshape(tf.cast(self._weight, tf.float64), [1])
        [summed] = sum_over_replicas([tf.concat([weight, check.sent], 0)], f"{name}_weight")
        check.compare(summed[1:])
        self.total = summed[0]
        return [self.total.op]

    def _check(self, step: tf.Tensor) -> ReplicaCheck:
        running, program = runtime.current(), self._program.stage_program
        described = program.split.graph.variables
        weights = [
            variable
            for index, variable in program.variables.items()
            if described[index].trainable and described[index].in_model and described[index].read_only
        ]
        # All ranks of a replica are given the same batch.
        is_told = running.config.check_inputs and program.stage == 0
        return ReplicaCheck(
            self._program.name,
            self._program.known_as,
            step.op,
            weights if running.config.check_replicas else [],
            tf.nest.flatten(list(self._tensors), expand_composites=True) if is_told else [],
            running.topology.replica,
            running.topology.members(CommGroup.RDP_GROUP),
        )


def _no_seed(microbatch: int) -> tf.Tensor:
    raise AssertionError("a step that draws no random numbers needs no seed")


def _total(weights: Sequence[Any]) -> Any:
    if all(isinstance(w, int) for w in weights):
        return sum(weights)
    return tf.add_n([tf.cast(w, tf.int64) for w in weights])

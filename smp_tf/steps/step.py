"""`@smp.step`: trace one microbatch, plan, cut, and run the pipeline in the caller's graph.

Read from top to bottom: `Step.__call__` sorts the arguments, `_prepare` goes the whole way from the function to this
rank's program (cut batch, trace, agreed plan, ownership, stage program), and `SplitProgram` writes the program into
the graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.batch.arguments import Arguments, sort_arguments
from smp_tf.batch.cut_batch import CutBatch
from smp_tf.batch.microbatch_errors import told_of_microbatches
from smp_tf.batch.microbatches import (
    SplitArgument,
    microbatch_spec,
    plan_arguments,
    sizes_of,
    static_batch_size,
    with_pieces,
)
from smp_tf.batch.results import pack
from smp_tf.batch.sliced_objects import ObjectTensors
from smp_tf.batch.structure import fill
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.keras.strategy_scope import refuse_strategy
from smp_tf.partition.graph.fingerprint import form
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.split.split import Split
from smp_tf.partition.tf_internals import autograph_convert, leave_unconverted
from smp_tf.partition.trace.lower import Lowered
from smp_tf.pipeline.run.reduction import Bucket, Reduce, Sums
from smp_tf.replicas import equal_start, unaveraged
from smp_tf.replicas.reduce_scatter import Receiver
from smp_tf.replicas.sums import reduction_name, sum_gradients_at
from smp_tf.sharding import layouts
from smp_tf.sharding.receivers import Applied, agreed_receivers, note_receivers, receivers_in
from smp_tf.steps import collectives_in_steps, post_partition_hooks, preparation
from smp_tf.steps.options import StepOptions
from smp_tf.steps.ownership import Ownership, decide_owners
from smp_tf.steps.program import Results, Source, SplitProgram
from smp_tf.steps.signatures import OWN_SIZES, Signatures
from smp_tf.steps.trace import Handed, Retrace, StepTrace, trace_step, with_outputs
from smp_tf.steps.unsplit import UnsplitProgram
from smp_tf.steps.xla_report import report_uncompiled
from smp_tf.tf_internals import tape_is_recording
from smp_tf.variables import step_seeds

# A user's tf.function calls a step and its outputs; AutoGraph has nothing to convert in them.
leave_unconverted("smp_tf")


class Step:
    """A function decorated with `@smp.step`.

    Args:
        function: one forward and backward (or one forward) of one microbatch.
        options: what the decorator was given.
        then: what to do with the results in the graph of the step, which then gives what it returns; by default it
            gives the results.
        applied: which gradients among the results `then` gives to an optimizer and to nobody else, given their
            structure with an `OutputSlot` in place of every tensor.
        examine: looks at each trace of the step, and says what else the step is to hand out.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: StepOptions,
        then: Callable[[Any], Any] | None = None,
        applied: Callable[[Any], Iterable[Applied]] | None = None,
        examine: Callable[[StepTrace, Retrace], Handed | None] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name: str = getattr(getattr(function, "func", function), "__name__", "step")
        self._function = function
        self._options = options
        self._then = then
        self._applied = applied
        self._examine = examine
        self._signature = inspect.signature(function)
        self._programs: dict[Any, SplitProgram | UnsplitProgram] = {}
        self._known_as = ""
        # By the form of the step: replicas come to each together, and to programs for other batches one by one.
        self._receivers: dict[tuple[str, ...], Mapping[int, Receiver]] = {}
        self._signatures: Signatures
        options.check(self._signature, self.name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # Kept in the instance, past any __setattr__ of its own, so that both live equally long.
        kept = f"_smp_step_{self.name}"
        if kept not in instance.__dict__:
            function = functools.partial(self._function, instance)
            instance.__dict__[kept] = Step(function, self._options, self._then, self._applied, self._examine)
        return instance.__dict__[kept]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step on a batch.

        Args:
            *args: the positional arguments of the function, tensors of the whole batch.
            **kwargs: its keyword arguments.

        Returns:
            What the function returns, with a `StepOutput` in place of every tensor.
        """
        program, tensors = self.find(*args, **kwargs)
        return program(tensors)

    def find(self, *args: Any, **kwargs: Any) -> tuple[SplitProgram | UnsplitProgram, Sequence[Any]]:
        """Returns the program for a call, traced, planned and built where there is none yet, and what to call it with.

        Args:
            *args: the positional arguments of the call.
            **kwargs: its keyword arguments.
        """
        runtime.current()
        refuse_strategy(f"Step {self.name!r} was called")
        if tape_is_recording():
            raise StepError(
                f"Step {self.name!r} was called under a tf.GradientTape. Gradients cannot be taken through a step "
                f"from outside, since its ops are spread over ranks: open the tape inside the step function and "
                f"return the gradients from it."
            )
        arguments = self._sort(args, kwargs)
        key = arguments.key
        if key not in self._programs:
            if not self._known_as:
                on_shutdown(self._forget)
                self._known_as = step_seeds.name_step(self.name)
                rank = runtime.current().topology.rank
                self._signatures = Signatures(
                    self.name,
                    lambda text: announce(text, rank),
                    0 if self._options.reduce_retracing else OWN_SIZES,
                    of_keras=self._options.of_keras,
                )
            self._programs[key] = self._program_for(arguments)
        return self._programs[key], arguments.tensors

    def _forget(self) -> None:
        self._programs.clear()
        self._receivers.clear()
        self._known_as = ""

    def _sort(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"Step {self.name!r}: {error}") from None
        arguments = sort_arguments(bound, self._options.input_signature)
        if self._options.input_signature is None:
            return arguments
        # What the signature leaves open is known here, and a smaller batch than that takes another program.
        own = arguments.with_own_types()
        batch = static_batch_size(self._planned(own), of_keras=self._options.of_keras)
        wanted = runtime.current().config.microbatches
        return own if batch is not None and batch < wanted else arguments

    def _planned(self, arguments: Arguments) -> tuple[SplitArgument, ...]:
        return plan_arguments(
            arguments.names,
            arguments.roots,
            arguments.specs,
            self._options.non_split,
            self._options.axes,
            of_keras=self._options.of_keras,
        )

    def _program_for(self, arguments: Arguments) -> SplitProgram | UnsplitProgram:
        """Returns the program for a call of a new kind: a new one, or one that takes any batch size."""
        wanted = runtime.current().config.microbatches
        planned = self._planned(arguments)
        batch = static_batch_size(planned, wanted, self._options.of_keras)
        if batch is not None and batch < wanted:
            batch = None
        settled = self._signatures.arguments_for_program(arguments, planned, batch)
        if settled is arguments:
            return self._prepare(arguments)
        if settled.key not in self._programs:
            try:
                traced = self._trace(
                    settled, [microbatch_spec(argument, None) for argument in with_pieces(planned, wanted)]
                )
            except Exception as error:
                # It comes of the open size, or it comes again with the size of this batch.
                self._signatures.needs_its_sizes(settled, error)
                return self._prepare(arguments)
            self._programs[settled.key] = self._prepare(settled, traced)
        return self._programs[settled.key]

    def _prepare(self, arguments: Arguments, traced: StepTrace | None = None) -> SplitProgram | UnsplitProgram:
        """Goes the whole way from the function to this rank's program, for one signature, perhaps traced already."""
        batch = self._cut_batch(arguments)
        if traced is None:
            told = told_of_microbatches(self.name, batch.sizes) if batch.microbatches > 1 else contextlib.nullcontext()
            with told:
                traced = self._trace(arguments, [microbatch_spec(each, batch.size) for each in batch.arguments])
        handed = self._handed(traced, arguments, batch.arguments)
        if handed is not None:
            traced = with_outputs(traced, handed)
        xla = runtime.current().config.xla if self._options.jit_compile is None else self._options.jit_compile
        self._refuse(traced, batch, xla=xla)
        local = self._options.local_outputs + ((handed.name,) if handed is not None else ())
        step = preparation.unplanned(self.name, self._known_as, traced, batch, local, is_first=not self._programs)
        if self._is_whole(step, xla=xla):
            return self._unsplit(arguments, step)
        agreed = preparation.agreed_plan(step)
        owned = self._owned(step, agreed)
        averages = runtime.current().topology.replicas > 1 and not unaveraged.are_left()
        keeps = self._options.keep_gradients
        reduce = self._sums_over(owned.receivers) if averages else None
        program = preparation.stage_program(step, agreed, owned, reduce, keeps_gradients=keeps, xla=xla)
        if xla:
            report_uncompiled(self.name, program)
        # Where nothing is trained replicas may well have weights of their own.
        begins_training = step.decides and bool(traced.graph.gradients)
        if begins_training:
            equal_start.take_those_of_one(owned.placed)
        if post_partition_hooks.run() and begins_training:
            equal_start.take_those_of_one(owned.placed)
        return SplitProgram(
            self.name,
            self._known_as,
            Source(traced.trace, traced.lowered, traced.is_random),
            batch,
            program,
            agreed.plan,
            Results(self._then, keeps, owned.receivers),
            agreed.expected,
        )

    def _cut_batch(self, arguments: Arguments) -> CutBatch:
        """Returns how a batch of a signature is cut."""
        wanted, planned = runtime.current().config.microbatches, self._planned(arguments)
        batch = static_batch_size(planned, wanted, self._options.of_keras)
        is_cut = any(argument.axis is not None for argument in planned)
        microbatches = self._microbatches(batch, wanted) if is_cut else 1
        sizes = sizes_of(batch, microbatches) if batch is not None else ()
        return CutBatch(with_pieces(planned, microbatches), microbatches, sizes)

    def _refuse(self, traced: StepTrace, batch: CutBatch, *, xla: bool) -> None:
        """Raises where a step cannot be run as it is asked for, and says what else there is to know of it."""
        running = runtime.current()
        topology, stages = running.topology, running.config.partitions or 1
        graph = traced.graph
        self._check(graph)
        collectives_in_steps.refuse_what_hangs(graph, self.name, stages, topology.replicas)
        words = collectives_in_steps.words_on_synchronized(graph, traced.models, batch.microbatches, topology.replicas)
        if words is not None:
            announce(words, topology.rank)
        if xla and running.config.gradient_offload and graph.gradients:
            raise StepError(
                f"Step {self.name!r} has jit_compile=True, and gradient_offload adds gradients up on the host: XLA "
                f"compiles a function for one device. Leave out one of the two."
            )
        for model in traced.models:
            model._smp_store.require_cut(stages, topology.stage)

    def _is_whole(self, step: preparation.Unplanned, *, xla: bool) -> bool:
        """Returns whether the step runs as it is: by one process, in one piece."""
        running, traced = runtime.current(), step.traced
        recompute = running.config.recompute and bool(traced.graph.gradients)
        is_one = (running.config.partitions or 1) == step.batch.microbatches == running.topology.size == 1
        return is_one and not (traced.is_random or xla or recompute)

    def _unsplit(self, arguments: Arguments, step: preparation.Unplanned) -> UnsplitProgram:
        """Returns a program that runs the step as it is."""
        running, traced = runtime.current(), step.traced
        if running.config.memory_limit is not None:
            step.propose(step.owners)
        decide_owners(traced.models, traced.lowered, [0] * len(traced.lowered.variables), (0,), 0, running.seed, ())
        post_partition_hooks.run()
        body = autograph_convert(self._function) if self._options.autograph else self._function
        return UnsplitProgram(
            traced.trace,
            traced.lowered,
            step.batch.arguments,
            lambda given: self._call(body, arguments.structure, given),
            self._then,
        )

    def _owned(self, step: preparation.Unplanned, agreed: preparation.AgreedPlan) -> Ownership:
        """Decides which variables this rank has, and who receives their gradients."""
        running, traced, cut = runtime.current(), step.traced, agreed.cut
        lowered, stage, used = traced.lowered, running.topology.stage, traced.graph.used_variables
        trained = {gradient.variable for gradient in traced.graph.gradients}
        of_used = [owner if index in used else None for index, owner in enumerate(cut.assignment.owners)]
        placed = decide_owners(traced.models, lowered, of_used, agreed.plan.placement, stage, running.seed, trained)
        mine = {
            index: variable
            for index, variable in enumerate(lowered.variables)
            if cut.stage_of_variable(index) is None or (index in used and cut.stage_of_variable(index) == stage)
        }
        applied = list(self._applied(lowered.results)) if self._applied is not None else None
        return Ownership(placed, mine, self._receivers_in(cut, lowered, applied), applied or ())

    def trace(self, *args: Any, **kwargs: Any) -> StepTrace:
        """Traces the step for arguments that are one microbatch, without running or planning anything.

        Args:
            *args: the positional arguments of the function.
            **kwargs: its keyword arguments.

        Returns:
            The trace; its graph takes the tensors of the arguments in their order.
        """
        arguments = self._sort(args, kwargs)
        return self._trace(arguments, [tf.type_spec_from_value(tensor) for tensor in arguments.tensors])

    def _handed(self, traced: StepTrace, arguments: Arguments, planned: Sequence[SplitArgument]) -> Handed | None:
        """Returns what else the step is to hand out; nothing where nobody looks at its trace."""
        if self._examine is None:
            return None

        def retrace(function: Callable[..., Any], samples: int) -> StepTrace:
            if any(argument.is_object for argument in planned):
                raise StepError("arguments that are cut by a method of their own have no whole batch")
            specs = [microbatch_spec(argument, samples) for argument in planned]
            return self._trace(arguments, specs, function)

        return self._examine(traced, retrace)

    def _trace(
        self, arguments: Arguments, specs: Sequence[tf.TypeSpec], function: Callable[..., Any] | None = None
    ) -> StepTrace:
        return trace_step(
            function or self._function,
            specs,
            lambda body, tensors: self._call(body, arguments.structure, tensors),
            autograph=self._options.autograph,
            name=self.name,
        )

    def _receivers_in(self, cut: Split, lowered: Lowered, applied: Sequence[Applied] | None) -> Mapping[int, Receiver]:
        """Returns, by output, who alone gets a gradient's sum, or rows of it, as all have agreed the first time."""
        if not cut.graph.gradients or not layouts.are_received_apart():
            return {}
        kind = form(cut.graph)
        if kind not in self._receivers:
            stage = runtime.current().topology.stage
            with tf.init_scope():
                own = receivers_in(cut, stage, lowered.variables, applied)
                self._receivers[kind] = agreed_receivers(own, self.name)
            note_receivers(cut, lowered.variables, self._receivers[kind], applied or ())
        return self._receivers[kind]

    def _sums_over(self, receivers: Mapping[int, Receiver]) -> Reduce:
        """Returns how the buckets are summed over the replicas, given who alone gets the sum of an output."""
        name = reduction_name(self._known_as)

        def reduce(sums: Sequence[tf.Tensor], bucket: Bucket) -> Sums:
            to = [receivers.get(position) for position in bucket.positions]
            return Sums(*sum_gradients_at(sums, to, f"{name}_{bucket.number}"))

        return reduce

    def _check(self, graph: OpGraph) -> None:
        """Raises where the traced step cannot mean anything sensible when it is split."""
        for node in graph.nodes:
            for index in node.writes:
                variable = graph.variables[index]
                if variable.trainable and variable.in_model:
                    raise StepError(
                        f"Step {self.name!r} assigns the trainable weight {variable.name!r} (op {node.name!r}). "
                        f"Within a step, later microbatches would see other weights than earlier ones. "
                        + (
                            "Leave it to an optimizer of tf.keras.optimizers (those of tf.compat.v1.train assign at "
                            "once), or assign between batches, in a callback."
                            if self._options.of_keras
                            else "Return the gradients and apply them after the step."
                        )
                    )
        effects = [n for n, node in enumerate(graph.nodes) if node.writes or (node.stateful and not node.reads)]
        wanted = graph.ancestors([*(t.node for t in graph.outputs), *effects])
        if not any(graph.nodes[number].call or graph.nodes[number].backward for number in wanted):
            raise StepError(
                f"Nothing that step {self.name!r} returns or updates depends on the model. Return the loss, the "
                f"gradients or the predictions, or update a metric with them."
            )

    def _microbatches(self, batch: int | None, wanted: int) -> int:
        if batch is None or batch >= wanted:
            return wanted
        if batch == 0:
            raise StepError(f"Step {self.name!r} was given a batch without samples. Leave empty batches out.")
        if not self._programs and not self._options.small_first_batch:
            raise StepError(
                f"The first batch of step {self.name!r} has {batch} samples, fewer than the {wanted} microbatches "
                f"it is to be cut into. Use batches of at least {wanted} samples, or fewer microbatches."
            )
        return batch

    def _call(self, body: Callable[..., Any], structure: Mapping[str, Any], tensors: Sequence[Any]) -> Any:
        given = [t.value() if isinstance(t, ObjectTensors) else t for t in tensors]
        filled = {name: fill(value, given) for name, value in structure.items()}
        bound = self._signature.bind_partial()
        bound.arguments.update(filled)
        return pack(body(*bound.args, **bound.kwargs), self.name)


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    local_outputs: Iterable[str] | None = None,
    keep_microbatch_gradients: bool = False,
    input_signature: Sequence[Any] | None = None,
    autograph: bool = True,
    reduce_retracing: bool = False,
    jit_compile: bool | None = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
) -> Any:
    """Decorates one forward-backward function so that it is split over the partitions and pipelined.

    The body is traced for one microbatch. Its tensor arguments, also those in lists, tuples, dictionaries, dataclasses
    and composite tensors, are cut along axis 0. In a set they are `tensor.ref()`, each of a type of its own: the set
    is gone through in the order of these types, which all ranks have. An object with a method
    `smp_slice(num_mb, mb, axis)` is cut by that method, which returns microbatch `mb` of `num_mb` with the same
    structure every time. The body runs for every microbatch, and each tensor it returns comes back as a
    `smp.StepOutput`.

    The sizes of microbatches differ by at most one. Averages weigh each by its number of samples; where only objects
    with `smp_slice` are cut, all weigh alike. A batch of fewer samples than microbatches runs one microbatch per
    sample, unless it is the first; within a `tf.function` that leaves the batch size open it is an error when it comes.

    Args:
        function: the function; left out when the decorator is given options.
        non_split_inputs: names of parameters that are passed whole to every microbatch.
        input_split_axes: the axis along which a parameter is cut, where it is not axis 0.
        local_outputs: keys, fields or positions in what the function returns that stay on the rank that makes them.
        keep_microbatch_gradients: keep gradients per microbatch besides their sum.
        input_signature: a list of `tf.TensorSpec` of the whole batch, as for `tf.function`; arguments are cast to it.
        autograph: convert Python control flow over tensors.
        reduce_retracing: leave the batch size open from the first batch on, so that one program takes all sizes. By
            default that begins with the third size.
        jit_compile: whether to compile the step's functions with XLA; by default what the configuration's `xla` says.
        experimental_relax_shapes: what `reduce_retracing` was once called.
        experimental_compile: what `jit_compile` was once called.

    Returns:
        A `Step`, callable eagerly or inside a `tf.function`.

    Raises:
        StepError: an option names a parameter that does not exist.

    Example:
        >>> @smp.step
        ... def train(images, labels):
        ...     with tf.GradientTape() as tape:
        ...         logits = model(images, training=True)
        ...         losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        ...         loss = tf.reduce_mean(losses)
        ...     return tape.gradient(loss, model.trainable_variables), loss
        >>> gradients, loss = train(images, labels)
        >>> average = loss.reduce_mean()
    """
    options = StepOptions(
        non_split=frozenset(non_split_inputs or ()),
        axes=dict(input_split_axes or {}),
        local_outputs=tuple(local_outputs or ()),
        keep_gradients=keep_microbatch_gradients,
        input_signature=input_signature,
        autograph=autograph,
        reduce_retracing=reduce_retracing or bool(experimental_relax_shapes),
        jit_compile=experimental_compile if jit_compile is None else jit_compile,
    )
    if function is None:
        return lambda decorated: Step(decorated, options)
    return Step(function, options)

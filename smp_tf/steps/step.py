"""`@smp.step`: trace one microbatch, plan, cut, and run the pipeline in the caller's graph.

The file reads from top to bottom. `Step.__call__` sorts the arguments. `_prepare` goes the whole way from the function
to this rank's program (cut batch, trace, agreed plan, ownership, stage program, outputs). `SplitProgram` writes the
program into the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.batch.arguments import Arguments, sort_arguments
from smp_tf.batch.cut_batch import CutBatch
from smp_tf.batch.microbatch_errors import told_of_microbatches
from smp_tf.batch.microbatches import (
    SplitArgument,
    microbatch_spec,
    static_batch_size,
    with_pieces,
)
from smp_tf.batch.results import pack
from smp_tf.batch.sliced_objects import ObjectTensors
from smp_tf.batch.structure import fill, key_of
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.keras.strategy_scope import refuse_strategy
from smp_tf.partition.tf_internals import autograph_convert, leave_unconverted
from smp_tf.replicas import equal_start
from smp_tf.sharding.receivers import Applied
from smp_tf.steps import post_partition_hooks, preparation
from smp_tf.steps.batch_cut import cut_arguments, cut_batch
from smp_tf.steps.leftovers import drop_graphs
from smp_tf.steps.options import StepOptions
from smp_tf.steps.outputs import describe_outputs
from smp_tf.steps.ownership import AgreedReceivers, decide_owners
from smp_tf.steps.program import Results, Source, SplitProgram
from smp_tf.steps.refusals import refuse
from smp_tf.steps.sequel import Sequel
from smp_tf.steps.signatures import OWN_SIZES, NeedsItsSizesError, Signatures
from smp_tf.steps.trace import Examined, Retrace, StepTrace, of_one_microbatch, trace_step
from smp_tf.steps.unsplit import UnsplitProgram
from smp_tf.steps.xla_report import report_uncompiled
from smp_tf.tf_internals import no_tape_is_recording
from smp_tf.variables import step_seeds

# A user's tf.function calls a step and its outputs. AutoGraph has nothing to convert in them.
leave_unconverted("smp_tf")


class Step:
    """A function decorated with `@smp.step`.

    Args:
        function: one forward and backward (or one forward) of one microbatch.
        options: options of the decorator.
        then: what comes after the step in its graph; the step gives what it returns. By default it gives its results.
        applied: which gradients among the results are given to an optimizer and to nobody else, given their structure
            with an `OutputSlot` in place of every tensor; None where the script may give any of them to one.
        examine: looks at each trace of the step, and may change it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: StepOptions,
        then: Sequel | None = None,
        applied: Callable[[Any], Iterable[Applied] | None] | None = None,
        examine: Callable[[StepTrace, Retrace], Examined] | None = None,
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
        self._receivers = AgreedReceivers(self.name)
        self._signatures: Signatures
        #: What a program is for besides the types of its arguments, such as a number of samples of all replicas.
        self.also: Hashable = None
        options.check(self._signature, self.name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # It is kept in the instance, past any __setattr__ of its own, so that both live equally long.
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

    @property
    def known_as(self) -> str:
        """Returns what the step function is known by on all ranks, once the step was called in this job."""
        return self._known_as

    def tensors_of(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
        """Returns the tensor arguments of a call, in their order.

        Args:
            *args: the positional arguments of the call.
            **kwargs: its keyword arguments.
        """
        return self._sort(args, kwargs).tensors

    def find(self, *args: Any, **kwargs: Any) -> tuple[SplitProgram | UnsplitProgram, Sequence[Any]]:
        """Returns the program for a call, and its arguments. A new program is traced, planned and built.

        Args:
            *args: the positional arguments of the call.
            **kwargs: its keyword arguments.
        """
        if not self._programs:
            # It raises an error where no job runs. At the end of a job all programs are dropped.
            runtime.current()
        if tf.distribute.has_strategy():
            refuse_strategy(f"Step {self.name!r} was called")
        if not no_tape_is_recording():
            raise StepError(
                f"Step {self.name!r} was called under a tf.GradientTape. Gradients cannot be taken through a step "
                f"from outside, since its ops are spread over ranks: open the tape inside the step function and "
                f"return the gradients from it."
            )
        arguments = self._sort(args, kwargs)
        key = arguments.key, self.also
        program = self._programs.get(key)
        if program is None:
            self._begin_job()
            program = self._programs[key] = self._program_for(arguments)
            drop_graphs()
        return program, arguments.tensors

    def _begin_job(self) -> None:
        """Prepares what the step keeps in this job, unless the step has been called in it."""
        if self._known_as:
            return
        on_shutdown(self._forget)
        self._known_as = step_seeds.name_step(self.name)
        rank = runtime.current().topology.rank
        self._signatures = Signatures(
            self.name,
            lambda text: announce(text, rank),
            0 if self._options.reduce_retracing else OWN_SIZES,
            of_keras=self._options.of_keras,
        )

    def _forget(self) -> None:
        self._programs.clear()
        self._receivers = AgreedReceivers(self.name)
        self._known_as = ""

    def _sort(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"Step {self.name!r}: {error}") from None
        arguments = sort_arguments(bound, self._options.input_signature)
        if self._options.input_signature is None:
            return arguments
        # What the signature leaves open is known here. A smaller batch takes another program.
        own = arguments.with_own_types()
        batch = static_batch_size(cut_arguments(own, self._options), of_keras=self._options.of_keras)
        wanted = runtime.current().config.microbatches
        return own if batch is not None and batch < wanted else arguments

    def _program_for(self, arguments: Arguments) -> SplitProgram | UnsplitProgram:
        """Returns the program for a call of a new kind: a new one, or one that takes any batch size."""
        wanted = runtime.current().config.microbatches
        planned = cut_arguments(arguments, self._options)
        batch = static_batch_size(planned, wanted, self._options.of_keras)
        if batch is not None and batch < wanted:
            batch = None
        settled = self._signatures.arguments_for_program(arguments, planned, batch)
        if settled is arguments:
            return self._prepare(arguments)
        key = settled.key, self.also
        if key not in self._programs:
            try:
                traced = self._trace(
                    settled, [microbatch_spec(argument, None) for argument in with_pieces(planned, wanted)]
                )
            except Exception as error:
                # Either the open size causes the error, or it comes again with the size of this batch.
                self._signatures.needs_its_sizes(settled, error)
                return self._prepare(arguments)
            try:
                self._programs[key] = self._prepare(settled, traced)
            except NeedsItsSizesError as error:
                self._signatures.needs_its_sizes(settled, error)
                return self._prepare(arguments)
        return self._programs[key]

    def _prepare(self, arguments: Arguments, traced: StepTrace | None = None) -> SplitProgram | UnsplitProgram:
        """Goes the whole way from the function to this rank's program, for one signature. It may be traced already."""
        is_first = not self._programs
        batch = cut_batch(self.name, arguments, self._options, is_first=is_first)
        if traced is None:
            told = told_of_microbatches(self.name, batch.sizes) if batch.microbatches > 1 else contextlib.nullcontext()
            with told:
                traced = self._trace(arguments, [microbatch_spec(each, batch.size) for each in batch.arguments])
        calls = traced.calls
        examined = self._examined(traced, arguments, batch)
        is_one_piece = batch.microbatches == 1 and (runtime.current().config.partitions or 1) == 1
        traced = of_one_microbatch(examined.traced) if is_one_piece else examined.traced
        xla = runtime.current().config.xla if self._options.jit_compile is None else self._options.jit_compile
        refuse(self.name, traced, batch, of_keras=self._options.of_keras, xla=xla)
        for model, types in calls:
            model._smp_fed.note(types)
        examined = dataclasses.replace(examined, local=self._options.local_outputs + examined.local)
        step = preparation.unplanned(self.name, self._known_as, examined, batch, is_first=is_first)
        if self._is_whole(step, xla=xla):
            return self._unsplit(arguments, step)
        agreed = preparation.agreed_plan(step)
        given = self._applied(traced.lowered.results) if self._applied is not None else None
        applied = list(given) if given is not None else None
        owned = preparation.ownership(step, agreed, self._receivers, applied)
        keeps = self._options.keep_gradients
        program = preparation.stage_program(
            step,
            agreed,
            owned,
            keeps_gradients=keeps,
            by_script=self._then is None,
            joins=examined.joins,
            logs=self._options.logs_over_replicas,
            xla=xla,
        )
        outputs = describe_outputs(traced.lowered, agreed.cut, owned.receivers, keeps_gradients=keeps)
        if xla:
            report_uncompiled(self.name, program)
        # Where nothing is trained, replicas may have different weights.
        begins_training = step.decides and bool(traced.graph.gradients)
        if begins_training:
            equal_start.take_those_of_one(owned.decided)
        if post_partition_hooks.run() and begins_training:
            equal_start.take_those_of_one(owned.decided)
        return SplitProgram(
            self.name,
            self._known_as,
            Source(
                *(traced.trace.key, traced.lowered.captures, traced.lowered.results, traced.is_random),
                ahead_of=self._options.ahead_of and self._options.ahead_of(),
            ),
            batch,
            program,
            agreed.plan,
            Results(outputs, self._then),
            agreed.expected,
        )

    def _is_whole(self, step: preparation.Unplanned, *, xla: bool) -> bool:
        """Returns whether the step runs as it is, by one process and in one piece."""
        running, traced = runtime.current(), step.traced
        recompute = running.config.recompute and bool(traced.graph.gradients)
        is_one = (running.config.partitions or 1) == step.batch.microbatches == running.topology.size == 1
        # Keras's loops weigh the losses of a training that is cut, in a batch of one sample, too.
        is_one = is_one and not (self._options.of_keras and running.config.microbatches > 1)
        return is_one and not (traced.is_random or xla or recompute)

    def _unsplit(self, arguments: Arguments, step: preparation.Unplanned) -> UnsplitProgram:
        """Returns a program that runs the step as it is."""
        running, traced = runtime.current(), step.traced
        if running.config.memory_limit is not None:
            step.propose(step.owners)
        decide_owners(traced.models, traced.lowered, [0] * len(traced.lowered.variables), (0,), running.seed, ())
        post_partition_hooks.run()
        body = autograph_convert(self._function) if self._options.autograph else self._function
        return UnsplitProgram(
            traced.trace,
            traced.lowered,
            step.batch.arguments,
            lambda given: self._call(body, arguments.structure, given),
            self._then,
        )

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

    def trace_for(self, samples: int | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> StepTrace:
        """Traces another function that takes the step's arguments, without running or planning anything.

        Args:
            samples: number of samples to trace it for; None leaves it open.
            function: the function.
            *args: the positional arguments of a call of the step.
            **kwargs: its keyword arguments.
        """
        arguments = self._sort(args, kwargs)
        planned = cut_arguments(arguments, self._options)
        return self._trace(arguments, [microbatch_spec(each, samples) for each in planned], function)

    def key_of(self, *args: Any, **kwargs: Any) -> Hashable:
        """Returns what tells calls apart: the types of their tensors, and the values of all other arguments.

        Args:
            *args: the positional arguments of the call.
            **kwargs: its keyword arguments.
        """
        return self._sort(args, kwargs).with_own_types().key

    def form_of(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns what tells calls apart, but for the number of samples in their batches.

        Args:
            *args: the positional arguments of the call.
            **kwargs: its keyword arguments.
        """
        arguments = self._sort(args, kwargs)
        return _form(arguments.structure, cut_arguments(arguments, self._options))

    def samples_in(self, *args: Any, **kwargs: Any) -> int | None:
        """Returns the number of samples of a batch; None where it is known only when the step runs.

        Args:
            *args: the positional arguments of the call.
            **kwargs: its keyword arguments.
        """
        own = self._sort(args, kwargs).with_own_types()
        return static_batch_size(cut_arguments(own, self._options), of_keras=self._options.of_keras)

    def _examined(self, traced: StepTrace, arguments: Arguments, batch: CutBatch) -> Examined:
        """Returns the step after it was looked at; as it was traced where nobody does."""
        if self._examine is None:
            return Examined(traced)

        def retrace(function: Callable[..., Any], samples: int | None) -> StepTrace:
            if any(argument.is_object for argument in batch.arguments):
                raise StepError("arguments that are cut by a method of their own have no whole batch")
            specs = [microbatch_spec(argument, samples) for argument in batch.arguments]
            return self._trace(arguments, specs, function)

        samples, form = sum(batch.sizes) or None, _form(arguments.structure, batch.arguments)
        known = Retrace(retrace, batch.microbatches, not batch.sizes, samples, batch.arguments, form)
        return self._examine(traced, known)

    def _trace(
        self, arguments: Arguments, specs: Sequence[tf.TypeSpec], function: Callable[..., Any] | None = None
    ) -> StepTrace:
        return trace_step(
            function or self._function,
            specs,
            lambda body, tensors: self._call(body, arguments.structure, tensors),
            autograph=self._options.autograph,
            name=self.name,
            axes=[argument.axis for argument in cut_arguments(arguments, self._options)],
        )

    def _call(self, body: Callable[..., Any], structure: Mapping[str, Any], tensors: Sequence[Any]) -> Any:
        given = [t.value() if isinstance(t, ObjectTensors) else t for t in tensors]
        filled = {name: fill(value, given) for name, value in structure.items()}
        bound = self._signature.bind_partial()
        bound.arguments.update(filled)
        return pack(body(*bound.args, **bound.kwargs), self.name)


def _form(structure: Mapping[str, Any], arguments: Iterable[SplitArgument]) -> tuple[Any, ...]:
    """Returns what tells calls of a step apart, but for the number of samples in their batches."""
    return key_of(structure), *(microbatch_spec(argument, None) for argument in arguments)

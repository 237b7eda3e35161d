"""A step of a script's own whose results are those of one process that is given the whole batch.

    microbatches ──▶ losses and outputs of samples ──▶ joined ──▶ the rest of the function, once ──▶ results
             └─────▶ gradients, averaged           ──▶ what the function makes of them, once    ──▶ results

It does for a function with `@smp.step(whole_batch=True)` what `fit` does for a `train_step`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.batch.composite_parts import composite_parts
from smp_tf.batch.output import StepOutput, of_batch
from smp_tf.errors import PeerError, RankMismatchError, StepError
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.partition.samples.once_per_batch import NotOnceError
from smp_tf.partition.samples.one_microbatch import OneMicrobatch
from smp_tf.partition.samples.sample_rows import Rows
from smp_tf.partition.tf_internals import autograph_convert
from smp_tf.replicas import unaveraged
from smp_tf.steps.options import StepOptions
from smp_tf.steps.program import SplitProgram
from smp_tf.steps.signatures import NeedsItsSizesError
from smp_tf.steps.step import Step
from smp_tf.steps.trace import Examined, Retrace, StepTrace
from smp_tf.tf_internals import named
from smp_tf.whole_batch.batch_results import GRADIENTS, BatchResults
from smp_tf.whole_batch.gradient_calls import GradientCalls
from smp_tf.whole_batch.noted_trace import BatchTraces, NotedTrace, sample_rows, without_size
from smp_tf.whole_batch.own_losses import OwnLosses
from smp_tf.whole_batch.own_results import LOCAL, OwnResults
from smp_tf.whole_batch.replica_forms import ReplicaForms
from smp_tf.whole_batch.told_mixtures import tell_mixtures
from smp_tf.whole_batch.used_gradients import depend_on_states, gradients_of
from smp_tf.whole_batch.weighed_step import COEFFICIENTS, WeighedError


class WholeBatchStep:
    """A function decorated with `@smp.step(whole_batch=True)`.

    Args:
        function: one forward and backward (or one forward), written for the whole batch.
        options: options of the decorator.
    """

    _is_known: bool
    _forms: ReplicaForms
    _losses: OwnLosses

    def __init__(self, function: Callable[..., Any], options: StepOptions) -> None:
        functools.update_wrapper(self, function)
        self.name: str = getattr(getattr(function, "func", function), "__name__", "step")
        self._in_words = f"Step {self.name!r}"
        self._function = function
        self._options = options
        options.check(inspect.signature(function), self.name)
        self._forget()
        if options.keep_gradients:
            raise StepError(
                f"{self._in_words} has whole_batch=True and keep_microbatch_gradients=True. The first gives the "
                f"gradients of the batch, the second those of its microbatches. Leave out one of the two."
            )

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # It is kept in the instance, past any __setattr__ of its own, so that both live equally long.
        kept = f"_smp_step_{self.name}"
        if kept not in instance.__dict__:
            instance.__dict__[kept] = WholeBatchStep(functools.partial(self._function, instance), self._options)
        return instance.__dict__[kept]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step on a batch.

        Args:
            *args: the positional arguments of the function, tensors of the whole batch.
            **kwargs: its keyword arguments.

        Returns:
            What the function returns, with a `StepOutput` of one value in place of every tensor.
        """
        if not self._is_known:
            runtime.current()
            on_shutdown(self._forget)
            self._is_known = True
        program, tensors = self._losses.find(args, kwargs)
        results = self._results.get(program.key)
        self._losses.forget_graph()
        if results is not None:
            results.forget_traces()
        if results is None or not isinstance(program, SplitProgram):
            return program(tensors)
        if not tf.executing_eagerly():
            return results.filled(results.given(program(tensors), tensors))
        if program not in self._eager:
            self._eager[program] = _EagerProgram(program, results)
        return results.filled(self._eager[program](tensors))

    def _forget(self) -> None:
        """Drops what belongs to a job."""
        self._is_known = False
        # AutoGraph converts the script's function, and nothing else.
        self._inner = dataclasses.replace(self._options, autograph=False, local_outputs=())
        self._forms = ReplicaForms(self._in_words)
        self._losses = OwnLosses(self._in_words, self._body, self._step_of, self._inner, self._forms)
        #: By the keys of their traces.
        self._results: dict[object, OwnResults] = {}
        self._eager: dict[SplitProgram, _EagerProgram] = {}

    def _step_of(
        self,
        function: Callable[..., Any],
        options: StepOptions | None = None,
        examine: Callable[[StepTrace, Retrace], Examined] | None = None,
    ) -> Step:
        """Returns a step whose arguments are those of the script's function, and coefficients of losses."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        called.__name__ = self.name
        called.__signature__ = _with_coefficients(inspect.signature(self._function))  # type: ignore[attr-defined]
        return Step(called, options or self._inner, applied=_applied, examine=examine or self._examine)

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        body = autograph_convert(self._function) if self._options.autograph else self._function
        return body(*args, **kwargs)

    def _examine(self, traced: StepTrace, retrace: Retrace) -> Examined:
        """Traces a new program's step for a whole batch, and takes out of it what is computed once per batch."""
        graph, calls = self._losses.last
        assert graph is traced.trace.graph, "a step is looked at as soon as it is traced"
        results = OwnResults(self._in_words, traced, calls, self._options.local_outputs, retrace.arguments)
        part = results.sorted(traced)
        self._results[traced.trace.key] = results
        if results.uses_gradients and unaveraged.are_left():
            raise StepError(
                f"{self._in_words} has whole_batch=True and computes something of its gradients. With "
                f'"gradient_compression": "1bit" each replica has gradients of its own. Leave one of the two out.'
            )
        is_over_stages = results.uses_gradients and runtime.current().topology.stages > 1
        is_over_stages = is_over_stages or depend_on_states(traced)
        if retrace.microbatches > 1 or self._forms.has_several or is_over_stages:
            try:
                part = self._once_per_batch(NotedTrace(part, calls), results, retrace)
            except (NeedsItsSizesError, PeerError, RankMismatchError, StepError, WeighedError):
                raise
            except NotOnceError as error:
                raise StepError(
                    f"{self._in_words} has whole_batch=True, and what it makes of its gradients cannot be computed "
                    f"once per batch: {error}. Return the gradients as they are, and compute the rest after the step, "
                    f"as with smp.clip_by_global_norm."
                ) from None
            except Exception as error:
                raise StepError(
                    f"{self._in_words} has whole_batch=True, and cannot be traced for all samples of a batch: {error}"
                ) from error
        return Examined(part, (LOCAL,), results.rounds_of_telling)

    def _once_per_batch(self, part: NotedTrace, results: OwnResults, retrace: Retrace) -> StepTrace:
        """Returns the step for a microbatch, sorted, without what is computed once per batch."""
        is_one, count = retrace.microbatches == 1 and not self._forms.has_several, retrace.samples
        if not (is_one or count):
            count = _made_up_samples(retrace.microbatches)
        own = self._forms.samples(retrace.form, count) if count else None
        total = own.total if own is not None else None

        def noted(size: int | None) -> NotedTrace:
            taken = GradientCalls()
            return NotedTrace(results.sorted(retrace.trace(self._whole_batch(taken, part.calls), size)), taken)

        whole = noted(total)
        by_lengths = sample_rows(part.trace, whole.trace, total or 1)
        traces = BatchTraces(self._in_words, part, whole, by_lengths, functools.cache(lambda: noted(None)))
        composites = composite_parts(argument.spec for argument in retrace.arguments)
        if not is_one:
            assert own is not None
            tell_mixtures(traces, own if retrace.samples else None)
            self._losses.weigh(traces, own, retrace.form, composites)
        if self._forms.has_several:
            return self._over_replicas(traces, results, retrace.form, composites)
        any_size = traces.of_any_size() if retrace.has_any_size and not is_one else None
        rows: Rows = OneMicrobatch(by_lengths, whole.trace.lowered.graph) if is_one else by_lengths
        once = _batch_results(traces, rows, any_size, uses_gradients=results.uses_gradients)
        results.take(once, whole.trace, part.trace, rows)
        return once.taken_out()

    def _over_replicas(
        self, traces: BatchTraces, results: OwnResults, form: tuple[Any, ...], composites: Collection[int]
    ) -> StepTrace:
        """Returns the step for a microbatch without what is computed once of the batches of all replicas."""
        uses, total, only = results.uses_gradients, traces.rows.samples, None
        once, why = _of_any_size(traces, uses_gradients=uses)
        if once is None:
            once = _batch_results(traces, traces.rows, None, uses_gradients=uses, over_replicas=True)
            only = total
        assert once.joined is not None
        if why_not := once.joined.why_not(composites):
            raise StepError(
                f"{self._in_words} has whole_batch=True, and a result, or a metric, cannot be computed of the batches "
                f"of all replicas: {why_not}. Give tensors that are padded to one length, or compute it after the step."
            )
        self._forms.require(form, "what is computed once per batch", [only is None, once.joined.key])
        results.take(once, traces.whole.trace, traces.part.trace, traces.rows, only)
        if only is not None:
            announce(
                f"{self._in_words} has whole_batch=True, and needs the number of samples ({why}). So all batches need "
                f"{total} samples over all replicas. Use tf.shape(x)[0] in place of x.shape[0], and they may have any.",
                runtime.current().topology.rank,
            )
        return once.taken_out()

    def _whole_batch(self, calls: GradientCalls, like: GradientCalls) -> Callable[..., Any]:
        """Returns the function as it is looked at for all samples of a batch, without backward."""

        def whole(*args: Any, smp_coefficients: Any = (), **kwargs: Any) -> Any:
            with calls.left_out(like):
                return self._body(*args, **kwargs)

        return whole


def _batch_results(
    traces: BatchTraces, rows: Rows, any_size: NotedTrace | None, *, uses_gradients: bool, over_replicas: bool = False
) -> BatchResults:
    """Returns what a step computes once per batch."""
    return BatchResults(
        *(traces.step, traces.part.trace, traces.whole.trace, rows),
        of_any_size=any_size.trace if any_size is not None else None,
        gradients=gradients_of(traces.part, any_size or traces.whole) if uses_gradients else None,
        over_replicas=over_replicas,
    )


def _of_any_size(traces: BatchTraces, *, uses_gradients: bool) -> tuple[BatchResults | None, str]:
    """Returns what a step computes once for batches of any size on several replicas; None and the reason for none."""

    def made() -> BatchResults:
        any_size = traces.of_any_size()
        return _batch_results(traces, traces.rows, any_size, uses_gradients=uses_gradients, over_replicas=True)

    once, why = without_size(made)
    left_out = {} if once is None else once.left_out
    return (None, next(iter(left_out.values()))) if left_out else (once, why)


class _EagerProgram:
    """A program that is called outside of any graph, as a function of its own.

    Args:
        program: the program.
        results: what it gives.
    """

    def __init__(self, program: SplitProgram, results: OwnResults) -> None:
        self._program = program
        self._results = results
        self._outputs: Sequence[StepOutput] = ()
        signature = [argument.spec for argument in program.arguments]
        write = named(self._write, f"{program.name}_{program.stage_program.number}_of_batch")
        self._function = tf.function(write, autograph=False, input_signature=signature)

    def __call__(self, tensors: Sequence[Any]) -> list[StepOutput]:
        """Returns the results for a batch.

        Args:
            tensors: the step's tensor arguments.
        """
        with self._program.telling_of_microbatches(tensors):
            values = iter(self._function(*tensors))
        return [of_batch(output, next(values) if output.is_local else None) for output in self._outputs]

    def _write(self, *tensors: Any) -> list[Any]:
        self._outputs = self._results.given(self._program(tensors), tensors)
        return [output.outputs[0] for output in self._outputs if output.is_local]


def _with_coefficients(signature: inspect.Signature) -> inspect.Signature:
    """Returns the signature of a function that is given coefficients, too."""
    more = inspect.Parameter(COEFFICIENTS, inspect.Parameter.KEYWORD_ONLY, default=())
    parameters = list(signature.parameters.values())
    last = len(parameters) - (parameters[-1:] != [] and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*parameters[:last], more, *parameters[last:]])


def _applied(results: Mapping[str, Any]) -> Sequence[Any] | None:
    """Returns that no gradient goes to an optimizer alone where the step makes something of them; None elsewhere."""
    return [] if results.get(GRADIENTS) else None


def _made_up_samples(microbatches: int) -> int:
    """Returns a number of samples, for a look at a step that takes batches of any size."""
    return 8 * microbatches + 3

"""Lets the losses of a script's own loop count samples as in the whole batch.

What samples count is found out when a step is looked at (`loss_coefficients.py`). A step whose losses microbatches
average stays as it is. Any other becomes a step that is given, for each sample, what it counts (`weighed_step.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.batch.composite_parts import composite_parts
from smp_tf.errors import StepError
from smp_tf.steps.options import StepOptions
from smp_tf.steps.step import Step
from smp_tf.steps.trace import Examined
from smp_tf.whole_batch.forward_alone import forward_alone
from smp_tf.whole_batch.gradient_calls import GradientCalls
from smp_tf.whole_batch.loss_coefficients import LossCoefficients
from smp_tf.whole_batch.noted_trace import BatchTraces, NotedTrace, sample_rows, without_size
from smp_tf.whole_batch.own_samples import OwnSamples
from smp_tf.whole_batch.replica_calls import calls_on_replicas
from smp_tf.whole_batch.replica_forms import ReplicaForms
from smp_tf.whole_batch.weighed_step import OUTPUTS, WeighedError, WeighedStep, replaced_losses


class OwnLosses:
    """The losses of a step.

    Args:
        in_words: words for the step.
        body: the script's function.
        step_of: makes a step that takes the function's arguments, and coefficients, given what runs in it; also given,
            where these are others, its options and what looks at its traces.
        options: the options of such a step.
        forms: the forms of its calls.
    """

    def __init__(
        self,
        in_words: str,
        body: Callable[..., Any],
        step_of: Callable[..., Step],
        options: StepOptions,
        forms: ReplicaForms,
    ) -> None:
        self._in_words = in_words
        self._forms = forms
        self._body = body
        self._plain = step_of(self._traced)
        self._step_of = step_of
        self._options = options
        self._weighed: WeighedStep | None = None
        self._numbers: set[int] = set()
        #: By form of a call, the calls of `tf.GradientTape.gradient` for which all replicas have coefficients.
        self._agreed: dict[Hashable, set[int]] = {}
        #: The trace of a microbatch that came last: its graph, until `forget_graph`, and the gradients that it takes.
        self.last: tuple[Any, GradientCalls] = (None, GradientCalls())

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
        """Returns the program for a call of the step, and what to call it with.

        Args:
            args: the positional arguments of the call.
            kwargs: its keyword arguments.
        """
        first = None
        if self._weighed is None:
            try:
                return self._plain.find(*args, **kwargs)
            except WeighedError as error:
                first, self._weighed = error.coefficients, self._weighed_step()
                self._of_one = self._step_of(self._traced, dataclasses.replace(self._options, small_first_batch=True))
                self._numbers = {call.number for call in first.calls}
        samples = self._plain.samples_in(*args, **kwargs)
        if samples is None:
            raise StepError(
                f"{self._in_words} has whole_batch=True and a loss that is no average over samples, such as a sum. "
                f"What a sample counts in it depends on the number of samples, which is left open in the tf.function "
                f"that calls the step. Use batches of one size (drop_remainder=True), or call that function with "
                f"batches, and not within a loop over a dataset in it."
            )
        if samples == 1 and not self._forms.has_several:
            # Its one microbatch is the batch.
            return self._of_one.find(*args, **kwargs)
        if first is not None and first.samples.count != samples:
            first = None
        return self._weighed.program_for(args, kwargs, first)

    def forget_graph(self) -> None:
        """Drops the graph of the trace that came last, once the step's program is built."""
        _, calls = self.last
        calls.forget_tensors()
        self.last = None, calls

    def weigh(self, traces: BatchTraces, samples: OwnSamples, form: Hashable, composites: Collection[int]) -> None:
        """Raises where microbatches have to be told what their samples count, or where that cannot be told.

        Args:
            traces: the traces of the step.
            samples: of the whole batch, and which of them this replica has.
            form: the form of the step's call.
            composites: the arguments, by number, that are parts of ragged or sparse tensors.

        Raises:
            WeighedError: microbatches have to be told.
            StepError: it cannot be told.
        """
        if self._weighed is not None:
            return
        found = self._coefficients(traces, samples, None)
        if self._forms.has_several:
            self._agree(found, form, composites)
        if found.calls:
            raise WeighedError(found)

    def _agree(self, found: LossCoefficients, form: Hashable, composites: Collection[int]) -> None:
        """Takes the coefficients of all losses that need some on any replica.

        Raises:
            StepError: a replica cannot have them.
        """
        if form not in self._agreed:
            wanted, are_possible = calls_on_replicas(self._in_words, found, composites)
            if not are_possible:
                raise StepError(
                    f"{self._in_words} has whole_batch=True and a loss of ragged, sparse or text arguments, which "
                    f"cannot be joined over the replicas. Give it tensors that are padded to one length, or leave out "
                    f"whole_batch=True."
                )
            self._agreed[form] = wanted
        wanted = self._agreed[form]
        if not {call.number for call in found.calls} <= wanted <= set(found.possible):
            raise StepError(
                f"{self._in_words} has whole_batch=True, and its loss counts {found.samples.count} samples in another "
                f"way than those of the batches before. Over replicas, use batches of one size (drop_remainder=True)."
            )
        found.take(wanted)
        self._forms.require(form, "what a loss is computed of", [found.are_of_any_size, found.key])

    def _traced(self, *args: Any, smp_coefficients: Sequence[tf.Tensor] = (), **kwargs: Any) -> Any:
        """Returns what the function returns for a microbatch, in which gradients are noted."""
        calls, replaced = GradientCalls(), None
        if smp_coefficients:
            assert self._weighed is not None
            *coefficients, counts = smp_coefficients
            replaced = replaced_losses(self._weighed.calls, coefficients, functools.partial(_factor, counts))
        with calls.noted(replaced):
            results = self._body(*args, **kwargs)
        self.last = tf.compat.v1.get_default_graph(), calls
        return results

    def _weighed_step(self) -> WeighedStep:
        step = self._step_of(self._traced)
        forward = self._step_of(
            self._outputs,
            dataclasses.replace(self._options, small_first_batch=True, ahead_of=lambda: step.known_as),
            lambda traced, _: Examined(forward_alone(traced)),
        )
        return WeighedStep(self._in_words, step, forward, self._coefficients_for, self._samples_of, counts=True)

    def _samples_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OwnSamples:
        """Returns the samples of a batch, and which of them this replica has."""
        count = self._plain.samples_in(*args, **kwargs)
        assert count is not None
        return self._forms.samples(self._plain.form_of(*args, **kwargs), count)

    def _outputs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the tensors that coefficients are computed of, for a microbatch."""
        assert self._weighed is not None
        with GradientCalls().left_out(self.last[1]):
            self._body(*args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        return {OUTPUTS: [graph.get_tensor_by_name(name) for name in self._weighed.names]}

    def _coefficients_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Collection[int]
    ) -> LossCoefficients:
        """Returns the coefficients for batches of another structure."""
        form, samples = self._plain.form_of(*args, **kwargs), self._samples_of(args, kwargs)
        traces = self._traces_for(args, kwargs, samples)
        found = self._coefficients(traces, samples, self._agreed.get(form))
        if self._forms.has_several:
            self._agree(found, form, composite_parts(self._plain.tensors_of(*args, **kwargs)))
            return found
        # A loss that is an average for batches of one size may be none for those of another.
        told = {call.number for call in found.calls}
        self._numbers |= told
        # Arguments that are no tensors may choose another way through the function, with fewer losses.
        wanted = {number for number in self._numbers if number < len(traces.part.calls.targets)}
        return found if wanted == told else self._coefficients(traces, samples, wanted)

    def _traces_for(self, args: Sequence[Any], kwargs: Mapping[str, Any], samples: OwnSamples) -> BatchTraces:
        """Returns the traces of the step for a call, only to be looked at."""
        of_part = GradientCalls()

        def part_of(*given: Any, **named: Any) -> Any:
            with of_part.noted():
                return self._body(*given, **named)

        def whole(size: int | None) -> NotedTrace:
            calls = GradientCalls()

            def whole_of(*given: Any, **named: Any) -> Any:
                with calls.left_out(of_part):
                    return self._body(*given, **named)

            return NotedTrace(self._plain.trace_for(size, whole_of, *args, **kwargs), calls)

        sizes = set(samples.parts)
        size = sizes.pop() if len(sizes) == 1 else None
        part = NotedTrace(self._plain.trace_for(size, part_of, *args, **kwargs), of_part)
        of_all = whole(samples.total)
        rows = sample_rows(part.trace, of_all.trace, samples.total)
        return BatchTraces(self._in_words, part, of_all, rows, lambda: whole(None))

    def _coefficients(
        self, traces: BatchTraces, samples: OwnSamples, numbers: Collection[int] | None
    ) -> LossCoefficients:
        """Returns the coefficients of losses.

        Raises:
            StepError: it cannot be told how a loss counts samples.
        """
        try:
            found = self._of_any_size(traces, samples, numbers) if self._forms.has_several else None
            # It is tried on numbers, also where the step is called in a graph.
            with tf.init_scope():
                if found is None:
                    found = LossCoefficients(traces.part, traces.whole, traces.rows, samples, weighed=numbers)
        except (TypeError, ValueError, LookupError, tf.errors.OpError) as error:
            raise StepError(
                f"{self._in_words} has whole_batch=True, and it cannot be told how its loss counts samples: {error}. "
                f"Leave out whole_batch=True, and return what is needed for each sample."
            ) from error
        kinds = traces.part.calls.kinds
        unknown = [number for number in found.unknown if any(kind is not None for kind in kinds[number])]
        if unknown:
            raise StepError(
                f"{self._in_words} has whole_batch=True, and it cannot be told how the loss counts samples that "
                f"call {unknown[0] + 1} of tape.gradient differentiates. It can where the loss is computed of a row "
                f"for each sample that the model or the arguments give, of a few MiB, without random numbers or "
                f"output_gradients. Leave out whole_batch=True where the loss is a mean over samples."
            )
        return found

    def _of_any_size(
        self, traces: BatchTraces, samples: OwnSamples, numbers: Collection[int] | None
    ) -> LossCoefficients | None:
        """Returns the coefficients for batches of any size; None where the step needs the number of samples."""

        def made() -> LossCoefficients:
            any_size = traces.of_any_size()
            with tf.init_scope():
                return LossCoefficients(
                    traces.part, traces.whole, traces.rows, samples, weighed=numbers, any_size=any_size
                )

        return without_size(made)[0]


def _factor(counts: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns by how many times the whole batch has more samples than a microbatch.

    Args:
        counts: how many samples the batch has, in a row for each sample of the microbatch.
        dtype: the type of the number.
    """
    return tf.cast(counts[0] / tf.cast(tf.shape(counts)[0], counts.dtype), dtype)

"""Makes what Keras's `fit`, `evaluate` and `predict` call for every batch: a cut step, made from one microbatch's.

    Keras's loop ──▶ next(iterator) ──▶ batch ─┐
                                               ▼
    train_step(data), one microbatch ──▶ smp.step ──▶ gradients, averaged ──▶ apply_gradients, once ──▶ logs
                                               └────▶ what metrics need, joined ──▶ metrics, once ──────┘

`train_step` is traced as a whole, so the user's own is treated like Keras's. Its `apply_gradients` is recorded
(`recorded_apply.py`), and everything happens in one `tf.function` per batch shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.batch.composite_parts import composite_parts
from smp_tf.batch.microbatches import count_samples
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.loss_check.check import check_gradient_uses, tell_unchecked, tell_written_weights
from smp_tf.optimizer.recorded_apply import ApplyRecorder, RecordedApply
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.tf_internals import autograph_convert
from smp_tf.partition.trace.lower import OutputSlot
from smp_tf.sharding.receivers import Applied
from smp_tf.steps.options import StepOptions
from smp_tf.steps.program import SplitProgram
from smp_tf.steps.sequel import SequelWriter
from smp_tf.steps.signatures import NeedsItsSizesError
from smp_tf.steps.step import Step
from smp_tf.steps.trace import Examined, Handed, Retrace, StepTrace, with_outputs
from smp_tf.training import logs
from smp_tf.training.loss_checks import KEPT, LossChecks
from smp_tf.training.loss_denominators import Denominators, Totals
from smp_tf.training.needed_coefficients import needed_coefficients
from smp_tf.training.once_per_batch import once_per_batch, written_states
from smp_tf.training.replica_batches import samples_of, with_samples
from smp_tf.training.replica_union import ReplicaUnion
from smp_tf.whole_batch.batch_results import BatchResults
from smp_tf.whole_batch.forward_alone import forward_alone
from smp_tf.whole_batch.gradient_calls import GradientCalls
from smp_tf.whole_batch.loss_coefficients import LossCoefficients
from smp_tf.whole_batch.noted_trace import BatchTraces, NotedTrace, sample_rows, without_size
from smp_tf.whole_batch.told_mixtures import tell_mixtures, tell_mixtures_of_prediction
from smp_tf.whole_batch.used_gradients import depend_on_states
from smp_tf.whole_batch.weighed_step import OUTPUTS, WeighedError, WeighedStep, replaced_losses


class BatchFunction:
    """Takes the next batch of an iterator and runs a step on it.

    Args:
        model: the distributed model.
        method: name of the model's method for one microbatch: "train_step", "test_step" or "predict_step".
        count: the model's counter of batches.
        gather: takes the method's result, with `StepOutput`s in place of tensors, and returns what Keras is given.
    """

    def __init__(self, model: Any, method: str, count: tf.Variable, gather: Callable[[Any], Any]) -> None:
        self._model = model
        self._method = method
        self._count = count
        self._gather = gather
        self._traced: list[tuple[list[RecordedApply], Denominators]] = []
        self._calls: list[GradientCalls] = []
        #: Numbers of the traces whose graphs something of this is still holding.
        self._with_graphs: list[int] = []
        self._totals: dict[int, Totals] = {}
        with tf.init_scope():
            self._batch_samples = tf.Variable(1.0, trainable=False, dtype=tf.float64, name="smp_samples_of_batch")
        self._once: dict[int, BatchResults] = {}
        self._of_metrics: dict[int, frozenset[str]] = {}
        #: Samples of this replica so far.
        self.samples = 0
        #: The plan of the step that ran last; None where the step is not split.
        self.plan: Plan | None = None
        self._in_words = f"{method} of model {model.name!r}"
        self._union = ReplicaUnion(self._in_words, self._over_replicas)
        self._checks = LossChecks(self._in_words, model, self._union)
        # Whether no program has been examined so far, and whether there are some for joined batches of all replicas.
        self._is_first, self._has_joined = True, False
        one_microbatch = self._one_microbatch
        self._step = self._step_of(lambda data: one_microbatch(data))
        #: The step that is given the coefficients of losses, once a loss is found that needs them.
        self._weighed: WeighedStep | None = None

    def _step_of(self, function: Callable[..., Any]) -> Step:
        options = StepOptions(
            jit_compile=self._jit_compile,
            # A training whose first batch is cut into fewer microbatches than asked for is a mistake. A single
            # prediction is not.
            small_first_batch=self._method != "train_step" or not self._is_first,
            of_keras=True,
            logs_over_replicas=self._over_replicas,
        )
        return Step(_named(function, self._method), options, self._finish, self._applied, self._examine)

    @property
    def _jit_compile(self) -> bool | None:
        return True if self._model.jit_compile else None

    def __call__(self, iterator: Any) -> Any:
        """Runs the step on the next batch, or on as many batches as `steps_per_execution` says.

        Args:
            iterator: gives batches. It is asked outside any graph. So when it ends, nothing is under way on any rank.
        """
        if self._model.run_eagerly:
            raise StepError(
                f"Model {self._model.name!r} is cut and pipelined as a graph, and cannot run eagerly. Leave "
                f"run_eagerly out of compile; to look into its layers, use tf.print."
            )
        several = self._model.steps_per_execution
        results = []
        for _ in range(1 if several is None else int(several.numpy())):
            found = self._union.next(iterator)
            batch = found.batch
            if not found.is_alike:
                self._union.part("their batches differ in more than the number of samples")
            if self._union.is_apart:
                self._begin_apart(is_alike=found.is_alike)
            self._step.also = self._union.also
            program, tensors = self._program_for(batch)
            self._forget_graphs()
            totals = self._totals.get(program.structure["traced"])
            if totals is not None:
                totals.tell(tensors)
            with self._checks.watching(program, tensors):
                results.append(program(tensors))
            self._checks.end(program)
            self.plan = program.plan if isinstance(program, SplitProgram) else None
            of_metrics = self._of_metrics.get(program.structure["traced"], frozenset())
            object.__setattr__(self._model, "_smp_logs_of_metrics", of_metrics)
            object.__setattr__(self._model, "_smp_states_of_all", self._union.states.held)
            self.samples += samples_of(batch)
        return self._over_batches(results)

    def _program_for(self, batch: Any) -> tuple[Any, Sequence[Any]]:
        """Returns the program for a batch, and what to call it with: besides the batch what its samples count."""
        found = None
        if self._weighed is None:
            try:
                return self._step.find(batch)
            except WeighedError as error:
                found, self._weighed = error.coefficients, self._weighed_step()
        return self._weighed.program_for([batch], {}, found, sizes=self._union.sizes, also=self._union.also)

    def _weighed_step(self) -> WeighedStep:
        """Returns the step that is given the coefficients of losses."""
        one_microbatch, outputs_of = self._one_microbatch, self._outputs_of
        step = self._step_of(lambda data, smp_coefficients: one_microbatch(data, smp_coefficients))
        forward = Step(
            _named(lambda data: outputs_of(data), f"{self._method}_forward"),
            StepOptions(
                jit_compile=self._jit_compile, small_first_batch=True, of_keras=True, ahead_of=lambda: step.known_as
            ),
            examine=lambda traced, _: Examined(forward_alone(traced)),
        )
        return WeighedStep(
            *(self._in_words, step, forward),
            lambda given, _, numbers: self._coefficients_for(given[0], numbers),
            lambda *_: self._union.samples,
        )

    def _outputs_of(self, data: Any) -> dict[str, Any]:
        """Returns the tensors that coefficients of losses are computed of, for a microbatch."""
        assert self._weighed is not None
        self._looked_at(data, GradientCalls().left_out(self._calls[-1]))
        graph = tf.compat.v1.get_default_graph()
        return {OUTPUTS: [graph.get_tensor_by_name(name) for name in self._weighed.names]}

    def _coefficients_for(self, batch: Any, numbers: Collection[int]) -> LossCoefficients:
        """Returns the coefficients of the losses, by numbers of their calls, for batches of another structure."""
        of_part, of_whole, samples = GradientCalls(), GradientCalls(), self._union.samples
        part = self._step_of(lambda data: self._looked_at(data, of_part.noted())).trace(
            with_samples(batch, samples.count, samples.parts[0])
        )
        whole = self._step_of(lambda data: self._whole_batch(data, of_whole, of_part)).trace(
            with_samples(batch, samples.count, samples.total)
        )
        rows, traces = sample_rows(part, whole, samples.total), (NotedTrace(part, of_part), NotedTrace(whole, of_whole))
        if self._union.has_several:
            found, _ = without_size(
                lambda: LossCoefficients(
                    *traces, rows, samples, weighed=numbers, any_size=self._of_any_size(batch, of_part)
                )
            )
            if found is not None and not any(
                found.arguments_of(call.number) & self._union.composites for call in found.calls
            ):
                return found
        return LossCoefficients(*traces, rows, samples, weighed=numbers)

    def _of_any_size(self, batch: Any, of_part: GradientCalls) -> NotedTrace:
        """Returns the step for batches of any size, only to be looked at."""
        calls = GradientCalls()

        def whole(data: Any) -> dict[str, Any]:
            return self._whole_batch(data, calls, of_part)

        return NotedTrace(self._step.trace_for(None, whole, batch), calls)

    def _looked_at(self, data: Any, noting: contextlib.AbstractContextManager[None]) -> dict[str, Any]:
        """Returns the step for some samples, only to be looked at."""
        recorder = ApplyRecorder(self._in_words)
        with recorder.recording(), noting:
            results = autograph_convert(getattr(self._model, self._method))(data)
        return {"results": results, "gradients": [list(apply.gradients) for apply in recorder.applies]}

    @property
    def _in_parts(self) -> bool:
        """Returns whether a loss's average is over several parts."""
        running = runtime.current()
        return running.config.microbatches > 1 or (self._over_replicas and running.topology.replicas > 1)

    @property
    def _over_replicas(self) -> bool:
        """Returns whether all replicas' batches are one. In an evaluation each has its own, and some may have more."""
        return self._method == "train_step"

    def _note_totals(self, traced: StepTrace, retrace: Retrace) -> None:
        """Prepares to tell losses of a new program what they need to know of a whole batch."""
        number = traced.lowered.results["traced"]
        _, denominators = self._traced[number]
        if denominators.is_needed:
            cut = retrace.arguments, retrace.microbatches
            totals = Totals(denominators, self._batch_samples, traced.trace, cut, self._over_replicas)
            self._totals[number] = totals

    def _forget_graphs(self) -> None:
        """Drops what holds the graphs of traces, whose programs are built by now."""
        for number in self._with_graphs:
            applies, denominators = self._traced[number]
            denominators.forget_graph()
            self._traced[number] = [apply.without_gradients() for apply in applies], denominators
            self._calls[number].forget_tensors()
            if number in self._once:
                self._once[number].forget_traces()
        self._with_graphs.clear()

    def _over_batches(self, results: list[Any]) -> Any:
        """Returns what Keras is given after several batches: their outputs joined, or the logs of the last one."""
        if self._method != "predict_step" or len(results) == 1:
            return results[-1]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *results)

    def _examine(self, traced: StepTrace, retrace: Retrace) -> Examined:
        """Traces a new program's step for a whole batch: for what is computed once per batch, and to check its losses.

        See `whole_batch/batch_results.py` and `loss_check/check.py`.
        """
        self._note_totals(traced, retrace)
        union, is_first = self._union, self._is_first
        is_one = retrace.microbatches == 1 and not union.has_several
        if self._method == "predict_step" and not is_one:
            axes = {number: argument.axis for number, argument in enumerate(retrace.arguments)}
            tell_mixtures_of_prediction(self._in_words, traced.lowered.graph, axes, union.samples)
        if self._method == "predict_step" or (is_one and not depend_on_states(traced)):
            return Examined(traced)
        is_checked = bool(runtime.current().config.check_losses) and not is_one
        if is_checked:
            tell_written_weights(self._in_words, traced.lowered.graph)
        number, check = traced.lowered.results["traced"], None
        union.begin_program()
        # Replicas come to another structure one by one. Then each holds its losses against its own batch.
        of_all = is_first or not union.has_several
        checked = union.sizes if of_all else [union.samples.count]
        try:
            traces = self._traces(traced, retrace, union.sizes)
            if not is_one:
                tell_mixtures(traces, union.samples)
            traced = self._without_once(traces, retrace)
            if is_checked and (of_all or not self._traced[number][1].is_needed):
                if not of_all:
                    traces = self._traces(traced, retrace, checked)
                check = self._checks.add(traced, traces, checked, is_first=is_first)
        except (NeedsItsSizesError, WeighedError):
            raise
        except Exception as error:
            tell_unchecked(self._in_words, f"the step cannot be traced for all samples of a batch: {error}")
            if union.has_several and not union.is_apart:
                union.can_join(None)
        self._is_first = False
        once = self._once.get(number)
        if union.has_several:
            union.states.note(once.states if once is not None else [], written_states(traced))
        if is_checked and (once is None or not once.has_gradients):
            check_gradient_uses(self._in_words, traced.lowered.graph)
        sums = 0 if once is None else once.rounds_of_telling(self._traced[number][0])
        joined = once is not None and once.has_joined_samples
        self._has_joined = self._has_joined or joined
        if check is None:
            return Examined(traced, (), sums, joined)
        return Examined(with_outputs(traced, Handed(KEPT, check.kept)), (KEPT,), sums, joined)

    def _weigh(self, traces: BatchTraces) -> None:
        """Raises where microbatches have to be told what their samples count in a loss of the whole batch."""
        number = traces.part.trace.lowered.results["traced"]
        if self._weighed is not None or self._traced[number][1].scales_losses or self._union.is_apart:
            return
        union = self._union
        found = needed_coefficients(traces, union.samples, union.composites, together=union.comes_together)
        if found is not None:
            raise WeighedError(found)

    def _traces(self, traced: StepTrace, retrace: Retrace, sizes: Sequence[int]) -> BatchTraces:
        """Returns the traces of a step for a microbatch, which is there, and for a batch of some samples."""
        like = self._calls[traced.lowered.results["traced"]]

        def trace(samples: int | None) -> NotedTrace:
            calls = GradientCalls()
            return NotedTrace(retrace.trace(lambda data, *_: self._whole_batch(data, calls, like), samples), calls)

        whole = trace(sum(sizes))
        rows = sample_rows(traced, whole.trace, sum(sizes))
        return BatchTraces(self._in_words, NotedTrace(traced, like), whole, rows, lambda: trace(None))

    def _without_once(self, traces: BatchTraces, retrace: Retrace) -> StepTrace:
        """Takes out of a step, traced for a microbatch, what is computed once per batch; returns what is left."""
        traced = traces.part.trace
        is_one = retrace.microbatches == 1 and not self._union.has_several
        if not is_one:
            self._weigh(traces)
        if self._union.has_several:
            once = self._union.once_per_batch(traces)
        else:
            once = once_per_batch(traces, is_open=retrace.has_any_size and not is_one, is_one=is_one)
        if once.is_empty:
            return traced
        self._once[traced.lowered.results["traced"]] = once
        return once.taken_out()

    def _begin_apart(self, *, is_alike: bool) -> None:
        """Drops the programs for which batches of all replicas were joined, since these cannot be joined any more."""
        if self._weighed is not None and (self._has_joined or not is_alike):
            raise StepError(
                f"{self._in_words} has a loss in which the samples of all replicas count together, so their batches "
                f"are joined. These cannot be joined any more, since they differ in more than the number of samples. "
                f"Pad the batches of all replicas to one length."
            )
        if self._has_joined:
            self._has_joined = False
            one_microbatch = self._one_microbatch
            self._step = self._step_of(lambda data: one_microbatch(data))

    def _whole_batch(self, data: Any, calls: GradientCalls, like: GradientCalls) -> dict[str, Any]:
        """Returns the step for all samples of a batch, as one process computes it, without backward."""
        self._union.composites = composite_parts(tf.nest.flatten(data))
        return self._looked_at(data, calls.left_out(like))

    def _one_microbatch(self, data: Any, coefficients: Sequence[tf.Tensor] = ()) -> dict[str, Any]:
        recorder, calls = ApplyRecorder(self._in_words), GradientCalls()
        denominators = Denominators(self._in_words, self._batch_samples)
        with tf.name_scope("smp_samples"):
            # The names of the script's ops are those that they have in a trace for the whole batch.
            samples = _samples_in(data)
        in_parts = denominators.collecting(samples, self._model.metrics) if self._in_parts else contextlib.nullcontext()
        weighed = None
        if coefficients:
            assert self._weighed is not None
            weighed = replaced_losses(self._weighed.calls, coefficients, denominators.sum_factor)
        with recorder.recording(), in_parts, calls.noted(weighed):
            results = autograph_convert(getattr(self._model, self._method))(data)
        self._with_graphs.append(len(self._traced))
        self._traced.append((recorder.applies, denominators))
        self._calls.append(calls)
        return {
            "results": results,
            "gradients": [list(apply.gradients) for apply in recorder.applies],
            "samples": samples,
            # Numbers stand for the optimizers and variables, since these are no results of a step.
            "traced": len(self._traced) - 1,
        }

    def _applied(self, results: Mapping[str, Any]) -> Iterator[Applied]:
        if "gradients" not in results:
            return
        for apply, gradients in zip(self._traced[results["traced"]][0], results["gradients"], strict=True):
            for slot, variable in zip(gradients, apply.variables, strict=True):
                if isinstance(slot, OutputSlot) and slot.spec is None:
                    yield Applied(slot.outputs[0], apply.optimizer, variable)

    def _finish(self, found: Mapping[str, Any], tensors: Sequence[Any], last: SequelWriter) -> Any:
        self._checks.hand_out(found)
        results, once = found["results"], self._once.get(found["traced"])
        applies, given = self._traced[found["traced"]][0], None
        if once is not None:
            self._of_metrics[found["traced"]] = once.of_metrics(results)
            # Before weights and the optimizer's counters change.
            written = once.write(found, tensors, applies, last, found["samples"].reduce_sum)
            results, given = written.results, written.gradients
        elif isinstance(results, dict):
            self._of_metrics[found["traced"]] = frozenset(
                name for name, value in results.items() if getattr(value, "follows_state", False)
            )
        if given is None:
            given = [[None if g is None else g.accumulate() for g in gradients] for gradients in found["gradients"]]
        last.update(lambda: _apply(applies, given))
        self._count.assign_add(1)
        results = self._gather(results)
        if self._over_replicas and isinstance(results, dict):
            name = f"smp_logs_{self._method}"
            return last.log(lambda: logs.average(results, found["samples"].reduce_sum(), name))
        return results


def _samples_in(data: Any) -> tf.Tensor:
    """Returns the number of samples of a microbatch that is being traced, an int64 scalar."""
    cut = [value for value in tf.nest.flatten(data) if isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))]
    return count_samples(cut[0], 0) if cut else tf.constant(1, tf.int64)


def _apply(applies: Sequence[RecordedApply], gradients: Sequence[Sequence[Any]]) -> None:
    """Lets the optimizers that a microbatch's trace has called apply the gradients of a batch."""
    for apply, given in zip(applies, gradients, strict=True):
        apply.apply(list(zip(given, apply.variables, strict=True)))


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = name
    return function

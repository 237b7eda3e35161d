"""Computes the logs of a step of Keras's, and the states of metrics, once per batch, from tensors of microbatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.batch.output import StepOutput
from smp_tf.errors import StepError
from smp_tf.gradients.stage_reduction import StageReduction, over_stages
from smp_tf.job import runtime
from smp_tf.partition.graph.op_graph import VARIABLE, OpGraph, Tensor, TensorType
from smp_tf.partition.samples.once_per_batch import OncePerBatch, find_once_per_batch, state_name
from smp_tf.partition.samples.rows_of_any_size import RowsOfAnySize
from smp_tf.partition.samples.sample_rows import Rows, SampleRows
from smp_tf.partition.samples.tail_places import TailPlaces, UntoldError, place_tail, require_told
from smp_tf.partition.spread import EVERYWHERE
from smp_tf.partition.trace.lower import OutputSlot
from smp_tf.replicas.gradient_marks import mark
from smp_tf.steps.sequel import SequelWriter
from smp_tf.steps.signatures import NeedsItsSizesError
from smp_tf.steps.trace import StepTrace
from smp_tf.variables import store
from smp_tf.whole_batch.joined_tail import JoinedTail
from smp_tf.whole_batch.tail_graph import TailGraph, joined_cut
from smp_tf.whole_batch.traced_results import follows_state, logs_of, logs_of_both
from smp_tf.whole_batch.used_gradients import UsedGradients, applied_name

#: The bytes that stages tell each other in every step, from which on a message says so.
_MANY_BYTES = 1 << 20
#: The name under which a step returns the tensors that its logs are computed from.
CUTS = "cuts"
#: The name under which it returns the gradients that something is computed from once per batch.
GRADIENTS = "whole_gradients"


class MadeOfGradients(Protocol):
    """Results that a step makes of its gradients, such as those that it gives to an optimizer in one call."""

    @property
    def variables(self) -> Sequence[Any]:
        """Returns the variable that each belongs to. Its stage has the result; all have it where there is none."""


@dataclass(frozen=True)
class Log:
    """Stands, in a step's result, for a log that is computed once per batch.

    Args:
        name: of the log.
    """

    name: str


@dataclass(frozen=True)
class Written:
    """The results that were computed once per batch.

    Args:
        results: what the step returns under "results", with the logs in their places.
        gradients: for each call of `apply_gradients`, its gradients, or other results that are made of gradients, with
            None for those of other stages; None where microbatches give them.
    """

    results: Any
    gradients: list[list[Any]] | None


class BatchResults:
    """The results that a step computes once per batch.

    Args:
        step: words for the step.
        part: the step as it is traced for a microbatch. It returns a dictionary with the logs under "results".
        whole: the same, traced for all samples of a batch.
        rows: what the tensors of the whole batch's graph are made of.
        of_any_size: the same step, traced without the number of samples, where batches of any size come.
        gradients: its gradients, where its results from them are computed once per batch.
        over_replicas: whether the batches of all replicas are one batch.
        of_samples: whether samples may go into them. Otherwise they are made of gradients and weights alone.

    Raises:
        NeedsItsSizesError: without the number, the trace has other ops.
        NotOnceError: its results from gradients cannot be computed once per batch.
    """

    def __init__(
        self,
        step: str,
        part: StepTrace,
        whole: StepTrace,
        rows: Rows,
        *,
        of_any_size: StepTrace | None = None,
        gradients: UsedGradients | None = None,
        over_replicas: bool = False,
        of_samples: bool = True,
    ) -> None:
        self._step = step
        #: The step as it is traced for a microbatch, until `forget_traces`.
        self._part: StepTrace | None = part
        self._gradients = gradients
        uses = gradients.uses if gradients is not None else None
        of_batch = of_any_size or whole
        graph = self._graph = of_batch.lowered.graph
        self._variables = of_batch.lowered.variables
        logs, same = logs_of_both(part, of_batch)
        if of_any_size is None:
            self._chosen = find_once_per_batch(rows, graph, part.lowered.graph, logs, same, uses, of_samples=of_samples)
        else:
            sized = whole.lowered.graph
            by_name = RowsOfAnySize(rows, sized, graph)
            self._chosen = find_once_per_batch(
                by_name, graph, part.lowered.graph, logs, same, uses, of_samples=of_samples
            )
            if gradients is None:
                of_one_size = find_once_per_batch(
                    rows, sized, part.lowered.graph, *logs_of_both(part, whole), of_samples=of_samples
                )
                _require_as_much(self._chosen, graph, of_one_size, sized)
        self._tail_graph = TailGraph(of_batch, self._chosen.tail)
        #: What the tail begins with over all replicas; None where each has a batch of its own.
        self.joined: JoinedTail | None = None
        if over_replicas:
            assert isinstance(rows, SampleRows), "a batch of several replicas is in parts"
            self.joined = JoinedTail(step, graph, self._chosen.tail, rows)
        self._follow_state = {name for name in self._chosen.logs if follows_state(graph, logs[name][0])}

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing is computed once per batch."""
        return not (self._chosen.logs or self._chosen.states or self._gradients)

    @property
    def has_gradients(self) -> bool:
        """Returns whether the gradients for optimizers are computed once per batch, and not by microbatches."""
        return self._gradients is not None

    def rounds_of_telling(self, applies: Sequence[MadeOfGradients]) -> int:
        """Returns how often the stages tell each other what each of them has computed of gradients.

        Before a plan is made, nobody knows which weights share a stage. So the number is that for weights which do not.
        Where all that a result needs is on one stage, it is told less often.

        Args:
            applies: the calls of `apply_gradients` in the step, or what else is made of gradients.
        """
        if not self.has_gradients:
            return 0
        numbers: dict[int, int] = {}

        def number_of(variable: Any) -> int | None:
            if store.store_of(variable) is None:
                return None
            return numbers.setdefault(id(store.whole_of(variable).handle), len(numbers))

        return len(self._places(applies, number_of).told)

    @property
    def states(self) -> list[Any]:
        """Returns the variables of the script that are written once per batch."""
        return [self._variables[index] for index in sorted(self._chosen.states)]

    @property
    def has_joined_samples(self) -> bool:
        """Returns whether samples of all replicas are brought together."""
        return self.joined is not None and self.joined.has_samples

    @property
    def left_out(self) -> Mapping[str, str]:
        """Returns why other logs, and writes of variables, are not computed once per batch, by name of either."""
        logs, variables = logs_of(self._traced), self._graph.variables
        names = {state_name(index): variable.name for index, variable in enumerate(variables)}
        return {
            names.get(name, name): why
            for name, why in self._chosen.left_out.items()
            if name in names or (name in logs and name not in self._chosen.logs)
        }

    def taken_out(self) -> StepTrace:
        """Returns the step, traced for a microbatch, without what is computed once per batch.

        The step returns the tensors that this is computed from under `CUTS` and `GRADIENTS`, and a `Log` for each log.
        """
        part = self._traced
        lowered, taken = part.lowered, self._chosen.logs
        names = {slot.outputs: name for name, slot in logs_of(part).items() if name in taken}
        results = dict(lowered.results)
        if self.has_gradients:
            del results["gradients"]
        slots = [slot for slot in tf.nest.flatten(results) if isinstance(slot, OutputSlot)]
        kept = sorted({n for slot in slots if slot.outputs not in names for n in slot.outputs})
        place = {old: new for new, old in enumerate(kept)}

        def changed(leaf: Any) -> Any:
            if not isinstance(leaf, OutputSlot):
                return leaf
            if leaf.outputs in names:
                return Log(names[leaf.outputs])
            return dataclasses.replace(leaf, outputs=tuple(place[n] for n in leaf.outputs))

        results = tf.nest.map_structure(changed, results)
        outputs = [lowered.graph.outputs[old] for old in kept]
        given = self._gradients.uses.given if self._gradients is not None else {}
        for name, tensors in (
            (CUTS, [cut.part for cut in self._chosen.tail.cuts]),
            (GRADIENTS, [given[tensor] for tensor in self._chosen.tail.gradients]),
        ):
            results[name] = [OutputSlot((len(outputs) + number,)) for number in range(len(tensors))]
            outputs += tensors
        graph = dataclasses.replace(self._chosen.part, outputs=tuple(outputs))
        lowered = dataclasses.replace(lowered, graph=graph, results=results)
        return StepTrace(part.trace, lowered, part.models)

    def forget_traces(self) -> None:
        """Drops the trace for a microbatch, once the step's program is built. Then `write` is all that is needed."""
        self._part = None

    @property
    def _traced(self) -> StepTrace:
        assert self._part is not None, "a trace is looked at before the program is built"
        return self._part

    def write(
        self,
        found: Mapping[str, Any],
        tensors: Sequence[Any],
        applies: Sequence[MadeOfGradients],
        last: SequelWriter,
        samples: Callable[[], Any],
        handles: Sequence[Any] = (),
    ) -> Written:
        """Writes into the graph, after the microbatches, what is computed once per batch.

        Args:
            found: what the step returns, with `StepOutput`s in place of tensors.
            tensors: the step's tensor arguments.
            applies: the calls of `apply_gradients` in the step, or what else is made of gradients.
            last: writes what brings together the samples of all replicas.
            samples: writes how many samples this replica's batch has.
            handles: what lets messages come after others of the same names, as collectives take it.

        Returns:
            What was computed.
        """
        tail = self._chosen.tail
        cuts = [joined_cut(cut, output.outputs) for cut, output in zip(tail.cuts, found[CUTS], strict=True)]
        given = tf.nest.flatten(list(tensors), expand_composites=True)
        arguments = {number: given[number] for number in tail.arguments}
        joined, own, mine = self.joined, cuts, arguments
        if joined is not None and joined.has_samples:
            cuts, arguments = last.join(lambda: joined.inputs(own, mine, samples(), handles))
        if self.has_gradients:
            outputs = dict(zip(tail.gradients, found[GRADIENTS], strict=True))
            values = self._write_spread(cuts, arguments, outputs, applies)
        else:
            values = dict(self._tail_graph.write(cuts, arguments))
        results = tf.nest.map_structure(
            lambda leaf: values[leaf.name][0] if isinstance(leaf, Log) else leaf, found["results"]
        )
        if not self.has_gradients:
            return Written(results, None)
        return Written(
            results,
            [
                # It is made of averages, and so the same on all replicas.
                [
                    mark(values.get(applied_name(call, number), [None])[0], spread=EVERYWHERE)
                    for number in range(len(apply.variables))
                ]
                for call, apply in enumerate(applies)
            ],
        )

    def _write_spread(
        self,
        cuts: Sequence[Any],
        arguments: Mapping[int, Any],
        outputs: Mapping[Tensor, StepOutput],
        applies: Sequence[MadeOfGradients],
    ) -> Mapping[str, Sequence[Any]]:
        """Writes this stage's part, where gradients are spread over the stages."""
        graph = self._graph
        gradients = {tensor: output.accumulate() for tensor, output in outputs.items() if output.is_local}
        places = self._places(applies, store.stage_of)
        try:
            require_told(graph, places)
        except UntoldError as error:
            raise StepError(
                f"{self._step} computes something of the gradients of several stages at once, which cannot be done: "
                f"{error}. Compute it in a loop of your own, after the step, or train with one partition."
            ) from None
        nbytes = sum(graph.type_of(tensor).nbytes() for told in places.told for tensor in told)
        if nbytes >= _MANY_BYTES:
            announce(
                f"{self._step} computes something of the gradients of several stages at once (op "
                f"{graph.nodes[places.told[0][0].node].name!r} among them), so each step sends "
                f"{nbytes / 2**20:,.1f} MiB of them to every stage. A norm is told in a few bytes: take it tensor by "
                f"tensor, as tf.linalg.global_norm does, in place of one of all gradients in a row.",
                runtime.current().topology.rank,
            )
        return self._tail_graph.write_spread(
            cuts, arguments, gradients, places, runtime.current().topology.stage, _tell
        )

    def _places(self, applies: Sequence[MadeOfGradients], stage_of_variable: Callable[[Any], int | None]) -> TailPlaces:
        """Returns which stage computes what, given the stage of each variable; None where all have it."""
        graph, tail, variables = self._graph, self._chosen.tail, self._variables
        assert self._gradients is not None
        by = self._gradients.variables
        stage_of = {tensor: stage_of_variable(by[tensor]) for tensor in tail.gradients}
        for number in tail.nodes:
            node = graph.nodes[number]
            if node.op == VARIABLE and node.source is not None and graph.variables[node.source].in_model:
                stage_of[Tensor(number, 0)] = stage_of_variable(variables[node.source])
        wanted: dict[Tensor, int | None] = {}
        for call, apply in enumerate(applies):
            for number, variable in enumerate(apply.variables):
                for tensor in tail.results.get(applied_name(call, number), ()):
                    assert isinstance(tensor, Tensor)
                    stage = None if variable is None else stage_of_variable(variable)
                    wanted[tensor] = stage if wanted.get(tensor, stage) == stage else None
        for name in self._chosen.logs:
            wanted.update({tensor: None for tensor in tail.results[name] if isinstance(tensor, Tensor)})
        return place_tail(graph, tail, stage_of, wanted)

    def of_metrics(self, results: Any) -> frozenset[str]:
        """Returns the logs that are read from a state, such as a metric's.

        Args:
            results: what the step returns under "results", before `write`.
        """
        if not isinstance(results, Mapping):
            return frozenset()
        return frozenset(
            key
            for key, value in results.items()
            if (isinstance(value, Log) and value.name in self._follow_state)
            or (isinstance(value, StepOutput) and value.follows_state)
        )


def _tell(values: Sequence[tuple[Any, TensorType]]) -> list[tf.Tensor]:
    """Tells all stages the tensors of each, in one message there and back."""
    sizes = [math.prod(d or 0 for d in kind.shape or ()) for _, kind in values]
    parts = [
        tf.zeros([size], tf.float64) if value is None else tf.reshape(tf.cast(value, tf.float64), [-1])
        for (value, _), size in zip(values, sizes, strict=True)
    ]
    told = tf.split(over_stages(tf.concat(parts, 0), _TOLD), sizes)
    return [tf.reshape(tf.cast(part, kind.dtype), kind.shape) for part, (_, kind) in zip(told, values, strict=True)]


def _of_its_stage(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns every number from the stage that has it. The others give zeros."""
    return tf.reduce_sum(tf.stack(parts), axis=0)


_TOLD = StageReduction(4, "what a step computes of the gradients of all stages", _of_its_stage)


def _require_as_much(found: OncePerBatch, graph: OpGraph, wanted: OncePerBatch, sized: OpGraph) -> None:
    """Raises where less is computed once per batch with the number of samples left open than with it."""
    missing = wanted.logs - found.logs
    states = {sized.variables[index].name for index in wanted.states}
    missing |= states - {graph.variables[index].name for index in found.states}
    if missing:
        raise NeedsItsSizesError(f"then {min(missing)!r} cannot be computed of a whole batch")

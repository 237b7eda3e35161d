"""What a step of a script's own gives for a whole batch: one value for each result, as one process computes it.

    the function returns    (gradients,        {"loss": loss,      "norm": norm})
    made of                  gradients          samples             gradients
    who has it               its weight's stage all ranks           all ranks

What is made of samples is computed once per batch (`batch_results.py`). What is linear in gradients is what
microbatches average to; anything else is computed of these averages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.batch.microbatches import SplitArgument, count_samples
from smp_tf.batch.output import StepOutput, of_batch
from smp_tf.batch.output_description import GradientSum, OutputDescription, OutputHolder
from smp_tf.batch.results import ResultStructure, local_outputs_of
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.samples.batch_tail import Cut
from smp_tf.partition.samples.gradient_uses import meets_states, nonlinear_uses, owner_of
from smp_tf.partition.trace.lower import OutputSlot
from smp_tf.steps.sequel import WithoutTasks
from smp_tf.steps.trace import StepTrace
from smp_tf.variables import store
from smp_tf.whole_batch.batch_results import BatchResults, Written
from smp_tf.whole_batch.gradient_calls import GradientCalls
from smp_tf.whole_batch.own_samples import gathered_samples, message_order
from smp_tf.whole_batch.tail_graph import joined_cut
from smp_tf.whole_batch.traced_results import named_leaves

#: The names under which a step returns its results, sorted.
OF_SAMPLES = "results"
OF_GRADIENTS = "gradients"
LOCAL = "local"


@dataclass(frozen=True, eq=False)
class Owners:
    """The variables that results made of gradients belong to.

    Args:
        variables: the variable of each; None where it belongs to none.
    """

    variables: tuple[Any, ...]


class OwnResults:
    """The results of one program of a step.

    Args:
        in_words: words for the step.
        traced: the step as it is traced for a microbatch.
        calls: the gradients that are taken in it.
        local: names of results that stay on the rank that makes them.
        arguments: how the step's arguments are cut.
    """

    def __init__(
        self,
        in_words: str,
        traced: StepTrace,
        calls: GradientCalls,
        local: Sequence[str],
        arguments: Sequence[SplitArgument],
    ) -> None:
        self._in_words = in_words
        self._structure = ResultStructure(traced.lowered.results)
        leaves = named_leaves(traced.lowered.results)
        self._names = [name for name, leaf in leaves if isinstance(leaf, OutputSlot)]
        graph = traced.lowered.graph
        taken = _gradients_of(traced, calls)
        made = _made_of(graph, taken)
        self._refuse_other_gradients(graph, made)
        self._gradients = [any(graph.outputs[n] in made for n in slot.outputs) for slot in self._structure.slots]
        kept = local_outputs_of(traced.lowered.results, local)
        self._local = [
            set(slot.outputs) <= kept and not of_gradients
            for slot, of_gradients in zip(self._structure.slots, self._gradients, strict=True)
        ]
        both = zip(self._gradients, self._local, strict=True)
        self._is_of_samples = [not (of_gradients or is_local) for of_gradients, is_local in both]
        owners = [
            taken.get(owner) if (owner := owner_of(graph, graph.outputs[slot.outputs[0]], taken)) is not None else None
            for slot, of_gradients in zip(self._structure.slots, self._gradients, strict=True)
            if of_gradients
        ]
        self._owners = Owners(tuple(owners))
        #: Whether gradients are needed once per batch, and not only as averages over microbatches.
        self.uses_gradients = bool(nonlinear_uses(graph) or meets_states(graph)) or any(o is None for o in owners)
        self._arguments = arguments
        self._once: BatchResults | None = None
        self._only: int | None = None
        self._cuts: list[Cut] = []

    def _refuse_other_gradients(self, graph: OpGraph, made: set[Tensor]) -> None:
        """Raises where a result is made of gradients of weights that `tf.GradientTape.gradient` has not taken."""
        others = _made_of(graph, (tensor for gradient in graph.gradients for tensor in gradient.tensors)) - made
        for slot, name in zip(self._structure.slots, self._names, strict=True):
            if any(graph.outputs[n] in others for n in slot.outputs):
                raise StepError(
                    f"{self._in_words} has whole_batch=True, and its result {name or '(all that it returns)'} is made "
                    f"of gradients that are taken by something else than tf.GradientTape.gradient, such as "
                    f"tf.gradients. Take them by a tape."
                )

    def sorted(self, traced: StepTrace) -> StepTrace:
        """Returns a trace of the step that returns a dictionary with its results, sorted.

        Args:
            traced: the trace, for a microbatch or for all samples.

        Raises:
            StepError: it returns another structure than it does for a microbatch.
        """
        lowered = traced.lowered
        slots = [leaf for _, leaf in named_leaves(lowered.results) if isinstance(leaf, OutputSlot)]
        if [name for name, leaf in named_leaves(lowered.results) if isinstance(leaf, OutputSlot)] != self._names:
            raise StepError(
                f"{self._in_words} returns another structure for all samples of a batch than for a microbatch. With "
                f"whole_batch=True both must be alike."
            )
        of_gradients = [slot for slot, is_one in zip(slots, self._gradients, strict=True) if is_one]
        local = [slot for slot, is_one in zip(slots, self._local, strict=True) if is_one]
        of_samples = [slot for slot, is_one in zip(slots, self._is_of_samples, strict=True) if is_one]
        results = {OF_SAMPLES: of_samples, OF_GRADIENTS: [of_gradients], LOCAL: local}
        return StepTrace(traced.trace, dataclasses.replace(lowered, results=results), traced.models)

    def take(self, once: BatchResults, whole: StepTrace, part: StepTrace, rows: Any, only: int | None = None) -> None:
        """Takes what computes results once per batch.

        Args:
            once: what computes them.
            whole: the step as it is traced for all samples, sorted.
            part: the step as it is traced for a microbatch, sorted.
            rows: what the tensors of `whole` are made of.
            only: how many samples the batches of all replicas have to have together; None for any number.

        Raises:
            StepError: a result, or what the step writes, cannot be computed once per batch.
        """
        of_samples = [name for name, is_one in zip(self._names, self._is_of_samples, strict=True) if is_one]
        names = {str(number): name for number, name in enumerate(of_samples)}
        for name, why in once.left_out.items():
            what = f"its result {names[name] or '(all that it returns)'}" if name in names else f"variable {name!r}"
            raise StepError(
                f"{self._in_words} has whole_batch=True, and {what} cannot be computed once per batch: {why}. Compute "
                f"it after the step, of what the step returns for each sample, or take it out; without "
                f"whole_batch=True it is computed for each microbatch."
            )
        if any(slot.spec is not None for slot in part.lowered.results[OF_SAMPLES]):
            raise StepError(
                f"{self._in_words} has whole_batch=True and returns a ragged or sparse tensor, whose samples cannot be "
                f"told apart. Return the tensors that it is made of, or leave out whole_batch=True."
            )
        for ours, theirs in zip(part.lowered.results[LOCAL], whole.lowered.results[LOCAL], strict=True):
            own, other = (t.lowered.graph.outputs[s.outputs[0]] for t, s in ((part, ours), (whole, theirs)))
            content = rows.of(other)
            if content.rows is None or rows.in_part(other) != own or ours.spec is not None:
                raise StepError(
                    f"{self._in_words} has whole_batch=True, and local_outputs names a result that is no row for each "
                    f"sample (op {part.lowered.graph.nodes[own.node].name!r}). Such a result is computed on every "
                    f"rank, of the whole batch: take it out of local_outputs."
                )
            self._cuts.append(Cut(other, own, content.rows, content.blocks))
        self._once, self._only = once, only

    def forget_traces(self) -> None:
        """Drops the traces, once the step's program is built."""
        if self._once is not None:
            self._once.forget_traces()

    @property
    def rounds_of_telling(self) -> int:
        """Returns how often the stages tell each other what each of them has computed of gradients."""
        return self._once.rounds_of_telling([self._owners]) if self._once is not None else 0

    def given(self, found: Mapping[str, Any], tensors: Sequence[Any]) -> list[StepOutput]:
        """Writes into the graph what is computed once per batch, and returns all results, in their order.

        Args:
            found: what the step returns, sorted, with `StepOutput`s in place of tensors.
            tensors: the step's tensor arguments.
        """
        of_samples: Iterable[Any] = found[OF_SAMPLES]
        of_gradients: Iterable[StepOutput] = [of_batch(g, g.accumulate()) for g in found.get(OF_GRADIENTS, [[]])[0]]
        if self._once is not None:
            written = self._write(self._once, found, tensors)
            of_samples = [StepOutput(OutputDescription(value.name), [value], [1]) for value in written.results]
            if written.gradients is not None:
                of_gradients = map(_of_gradients, written.gradients[0], self._owners.variables)
        else:
            of_samples = [of_batch(output, output.outputs[0]) for output in of_samples]
        cuts: Sequence[Cut | None] = self._cuts or [None] * len(found[LOCAL])
        local = [_joined(output, cut) for output, cut in zip(found[LOCAL], cuts, strict=True)]
        left = iter(of_samples), iter(of_gradients), iter(local)
        order = zip(self._is_of_samples, self._gradients, self._local, strict=True)
        return [next(left[kinds.index(True)]) for kinds in order]

    def _write(self, once: BatchResults, found: Mapping[str, Any], tensors: Sequence[Any]) -> Written:
        """Writes what is computed once per batch."""

        def samples() -> Any:
            cut = [(a, t) for a, t in zip(self._arguments, tensors, strict=True) if a.axis is not None]
            argument, tensor = cut[0]
            count = count_samples(tensor, argument.axis or 0)
            if self._only is not None:
                gathered_samples(count, self._only, self._in_words)
            return count

        return once.write(found, tensors, [self._owners], WithoutTasks(), samples, message_order())

    def filled(self, outputs: Sequence[StepOutput]) -> Any:
        """Returns what the function returns, with a `StepOutput` in place of every tensor.

        Args:
            outputs: these, in their order.
        """
        return self._structure.filled(outputs)


def _joined(output: StepOutput, cut: Cut | None) -> StepOutput:
    """Returns a result that stays on its rank, for the batch; it is joined as a cut is where there are microbatches."""
    if not output.is_local:
        return of_batch(output, None)
    return of_batch(output, output.outputs[0] if cut is None else joined_cut(cut, output.outputs))


def _of_gradients(value: Any, variable: Any) -> StepOutput:
    """Returns a result that is made of the gradients of the batch."""
    stage = None if variable is None else store.stage_of(variable)
    holder = OutputHolder(stage, None, stage in (None, runtime.current().topology.stage))
    name = value.name if value is not None else f"the gradient of {variable.name!r}"
    description = OutputDescription(name, holder, GradientSum())
    return of_batch(StepOutput(description, None, [1]), value)


def _gradients_of(traced: StepTrace, calls: GradientCalls) -> dict[Tensor, Any]:
    """Returns the variables by which a step takes gradients, by gradient; sparse ones in parts."""
    return {
        traced.tensor_of(part): source
        for gradients, sources in zip(calls.gradients, calls.sources, strict=True)
        for gradient, source in zip(gradients, sources, strict=True)
        if gradient is not None and isinstance(source, tf.Variable)
        for part in tf.nest.flatten(gradient, expand_composites=True)
    }


def _made_of(graph: OpGraph, starts: Iterable[Tensor]) -> set[Tensor]:
    """Returns all tensors that depend on one of some tensors."""
    found = set(starts)
    for number, node in enumerate(graph.nodes):
        if any(tensor in found for tensor in node.inputs):
            found.update(Tensor(number, index) for index in range(len(node.outputs)))
    return found

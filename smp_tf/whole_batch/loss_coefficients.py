"""Finds by how much each sample counts in a loss of the whole batch, where microbatches would have it count otherwise.

A loss is often a sum over samples, each times something that no weight goes into:

    tf.reduce_sum(each)                               each sample counts 1
    tf.reduce_sum(each) / 64                          each counts 1/64
    tf.reduce_sum(each * mask) / tf.reduce_sum(mask)  each counts mask / (what the mask leaves of the whole batch)

What a sample counts, its *coefficient*, is known before the model has run. So microbatches are given the coefficients
of their samples, and take their gradients by these in place of those of their own loss:

    arguments of the batch ──▶ coefficients ─┬─ of microbatch 0 ─▶ gradient of sum(coefficient × each) ─┐
                                             └─ of microbatch 1 ─▶ gradient of sum(coefficient × each) ─┴▶ that of
                                                                                                  the whole batch
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.batch.microbatches import sizes_of
from smp_tf.errors import StepError
from smp_tf.partition.graph.op_graph import ARGUMENT, Tensor
from smp_tf.partition.samples.batch_tail import Cut, Tail, find_tail, tail_from
from smp_tf.partition.samples.sample_rows import SampleRows
from smp_tf.steps.trace import StepTrace
from smp_tf.whole_batch.gradient_calls import GradientCalls
from smp_tf.whole_batch.tail_graph import TailGraph

#: Ops of whose inputs only type and shape matter.
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"})
_LOSS = "loss"
#: How often losses are compared on made-up arguments.
_TRIALS = 4


@dataclass(frozen=True)
class CallCoefficients:
    """How a call of `tf.GradientTape.gradient` takes the gradient of a whole batch's loss.

    Args:
        number: of the call in the step.
        tensors: names of the tensors whose gradients are taken, in the graph of a microbatch.
        constants: by position of a tensor that is the same for all samples: what it counts.
    """

    number: int
    tensors: tuple[str, ...]
    constants: Mapping[int, np.ndarray]


class LossCoefficients:
    """The coefficients of a step's losses, for batches of one structure.

    Args:
        part: the step as it is traced for a microbatch.
        whole: the same, traced for all samples of a batch.
        of_part: the gradients that are taken in `part`.
        of_whole: those that are taken in `whole`.
        rows: what the tensors of the whole batch's graph are made of.
        samples: of the whole batch.
        microbatches: into how many it is cut.
        weighed: numbers of the calls that batches of another structure have shown to need coefficients; None where
            this is the first.

    Raises:
        StepError: a loss needs coefficients, and in batches of this structure has none.
    """

    def __init__(
        self,
        part: StepTrace,
        whole: StepTrace,
        of_part: GradientCalls,
        of_whole: GradientCalls,
        rows: SampleRows,
        *,
        samples: int,
        microbatches: int,
        weighed: Collection[int] | None = None,
    ) -> None:
        self._samples = samples
        self._functions: list[_Coefficients] = []
        #: The calls whose losses microbatches do not average to that of the batch.
        self.calls: list[CallCoefficients] = []
        for number, targets in enumerate(of_whole.targets):
            if not (of_whole.is_plain[number] and of_part.is_plain[number]):
                continue
            if weighed is not None and number not in weighed:
                continue
            found = _coefficients(part, whole, of_part.targets[number], targets, rows)
            if found is None or (weighed is None and _is_average(*found, rows, samples, microbatches)):
                continue
            of_batch = found[0]
            cuts = of_batch.tail.cuts
            fixed = [place for place, cut in enumerate(cuts) if cut.axis is None]
            if any(cut.axis for cut in cuts) or any(of_batch.depends_on_arguments(place) for place in fixed):
                continue
            made = {n: _made_up(spec, np.random.RandomState(0)) for n, spec in of_batch.arguments.items()}
            values = of_batch(made, samples)
            graph = part.lowered.graph
            names = tuple(f"{graph.nodes[cut.part.node].name}:{cut.part.index}" for cut in cuts)
            self.calls.append(CallCoefficients(number, names, {place: values[place].numpy() for place in fixed}))
            self._functions.append(of_batch)
        if weighed is not None and {call.number for call in self.calls} != set(weighed):
            raise StepError(
                f"A loss counts the samples of a batch of {samples} in another way than those of the batches before: "
                f"what each counts cannot be told ahead. Use batches of one size (drop_remainder=True)."
            )

    def of(self, arguments: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the coefficients for a batch, call by call, of the tensors that hold samples: a row for each sample.

        Args:
            arguments: the step's tensor arguments, composite ones in parts.
        """
        found: list[tf.Tensor] = []
        for call, function in zip(self.calls, self._functions, strict=True):
            values = function({number: arguments[number] for number in function.arguments}, self._samples)
            found += [value for place, value in enumerate(values) if place not in call.constants]
        return found


class _Coefficients:
    """The gradient of a loss by the tensors where its tail begins, as a function of arguments.

    Args:
        traced: the step.
        tail: the loss's tail.
    """

    def __init__(self, traced: StepTrace, tail: Tail) -> None:
        self.tail = tail
        self._graph = traced.lowered.graph
        tail_graph = TailGraph(traced, tail)
        nodes = {self._graph.nodes[number].source: number for number in tail.nodes if self._is_argument(number)}
        #: By number of an argument that it reads, its type.
        self.arguments = {number: self._spec(Tensor(nodes[number], 0)) for number in tail.arguments}

        def gradients(values: list[tf.Tensor], arguments: list[tf.Tensor]) -> list[tf.Tensor]:
            results = tail_graph.write(values, dict(zip(self.arguments, arguments, strict=True)))
            loss = tf.add_n([tf.reduce_sum(value) for value in results[_LOSS]])
            found = tf.gradients(loss, values)
            return [
                tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)
                for value, gradient in zip(values, found, strict=True)
            ]

        self._function = tf.function(gradients, autograph=False).get_concrete_function(
            [self._spec(cut.whole) for cut in tail.cuts], list(self.arguments.values())
        )

    def __call__(self, arguments: Mapping[int, Any], samples: int) -> list[tf.Tensor]:
        """Returns the coefficients.

        Args:
            arguments: the step's tensor arguments, by number.
            samples: how many samples there are.
        """
        # Nothing depends on what the tensors hold.
        values = []
        for cut in self.tail.cuts:
            kind = self._graph.type_of(cut.whole)
            shape = list(kind.shape or ())
            if cut.axis is not None and shape[cut.axis] is None:
                shape[cut.axis] = samples
            values.append(tf.zeros(shape, kind.dtype))
        given = [tf.cast(arguments[number], spec.dtype) for number, spec in self.arguments.items()]
        return list(self._function(*values, *given))

    def depend_on_model(self) -> bool:
        """Returns whether a coefficient depends on what the model computes."""
        return bool(self._reached(range(len(self.tail.cuts))) & set(range(len(self.tail.cuts))))

    def depends_on_arguments(self, place: int) -> bool:
        """Returns whether the coefficient of a tensor depends on arguments.

        Args:
            place: the tensor, by its place among the tail's cuts.
        """
        return any(number >= len(self.tail.cuts) for number in self._reached([place]))

    def _reached(self, places: Iterable[int]) -> set[int]:
        """Returns which of the function's inputs the values of some of its outputs depend on."""
        graph = self._function.graph
        own = len(self.tail.cuts) + len(self.arguments)
        position = {tensor.op.name: number for number, tensor in enumerate(graph.inputs[:own])}
        stack = [graph.outputs[place].op for place in places]
        seen: set[str] = set()
        while stack:
            op = stack.pop()
            if op.name not in seen:
                seen.add(op.name)
                if op.type not in _SHAPES:
                    stack.extend(tensor.op for tensor in op.inputs)
        return {position[name] for name in seen if name in position}

    def _is_argument(self, number: int) -> bool:
        return self._graph.nodes[number].op == ARGUMENT

    def _spec(self, tensor: Tensor) -> tf.TensorSpec:
        kind = self._graph.type_of(tensor)
        return tf.TensorSpec(kind.shape, kind.dtype)


def _coefficients(
    part: StepTrace,
    whole: StepTrace,
    of_part: Sequence[tf.Tensor],
    of_whole: Sequence[tf.Tensor],
    rows: SampleRows,
) -> tuple[_Coefficients, _Coefficients] | None:
    """Returns the coefficients of a loss for the whole batch, and those that a microbatch has it count.

    None where it has none: it is not linear in anything that holds samples, or is computed of what is made at random.
    """
    graph, own = whole.lowered.graph, part.lowered.graph
    targets, in_part = list(map(whole.tensor_of, of_whole)), list(map(part.tensor_of, of_part))
    tail = find_tail(graph, rows, {_LOSS: targets}, begins_at_model=True)
    if tail.left_out or not tail.cuts or len(in_part) != len(targets):
        return None
    cuts = tuple(Cut(cut.part, cut.part, cut.axis) for cut in tail.cuts)
    of_batch = _Coefficients(whole, tail)
    of_microbatch = _Coefficients(part, tail_from(own, cuts, {_LOSS: tuple(in_part)}))
    if of_batch.depend_on_model() or of_microbatch.depend_on_model():
        return None
    if not set(of_microbatch.arguments) <= set(of_batch.arguments):
        return None
    return of_batch, of_microbatch


def _is_average(
    of_batch: _Coefficients, of_microbatch: _Coefficients, rows: SampleRows, samples: int, microbatches: int
) -> bool:
    """Returns whether what microbatches count on their own averages to what the batch counts, on made-up arguments."""
    sizes = sizes_of(samples, microbatches)
    for seed in range(_TRIALS):
        random = np.random.RandomState(seed)
        made = {number: _made_up(spec, random) for number, spec in of_batch.arguments.items()}
        whole = [value.numpy() for value in of_batch(made, samples)]
        begin = 0
        for size in sizes:
            own = {n: v[begin : begin + size] if rows.holds_samples(n) else v for n, v in made.items()}
            for cut, of_all, of_part in zip(of_batch.tail.cuts, whole, of_microbatch(own, size), strict=True):
                if cut.axis is None:
                    wanted, found = of_all, of_part.numpy()
                else:
                    here = np.take(of_all, np.arange(begin, begin + size), cut.axis)
                    wanted, found = here * samples, of_part.numpy() * size
                if not np.allclose(wanted, found, rtol=1e-4, atol=0.0):
                    return False
            begin += size
    return True


def _made_up(spec: tf.TensorSpec, random: np.random.RandomState) -> np.ndarray:
    """Returns values of a type: numbers of both signs, with zeros among them; small ones where they are whole."""
    dtype = spec.dtype.as_numpy_dtype
    if spec.dtype.is_floating:
        made = random.randn(*spec.shape) * (random.rand(*spec.shape) < 0.7)
    else:
        made = random.randint(0, 2, spec.shape)
    return np.asarray(made, dtype)

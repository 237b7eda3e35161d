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

With replicas, in training, the batch is that of all of them. Each is brought the arguments that coefficients are
computed of, computes all of these, and takes those of its samples.

A loss that compares samples, or computes something of an average, is no such sum. But for given outputs of the model
its gradient is one: what a row of the outputs counts is the gradient of the loss by it. So the model runs forward
first, alone (`forward_alone.py`), and coefficients are computed of its outputs, too:

    -tf.reduce_mean(tf.math.log_softmax(z @ tf.transpose(z)))     tf.sqrt(tf.reduce_mean(each))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.batch.output import StepOutput
from smp_tf.errors import StepError
from smp_tf.partition.graph.op_graph import ARGUMENT, VARIABLE, OpGraph, Tensor
from smp_tf.partition.samples.batch_tail import Tail, find_tail, tail_from
from smp_tf.partition.samples.sample_rows import SampleRows
from smp_tf.steps.trace import StepTrace
from smp_tf.whole_batch.forward_alone import NotAloneError, needed_alone
from smp_tf.whole_batch.joined_tail import join_cuts, join_rows
from smp_tf.whole_batch.made_up_values import compared_with, made_up
from smp_tf.whole_batch.noted_trace import NotedTrace
from smp_tf.whole_batch.own_samples import OwnSamples
from smp_tf.whole_batch.tail_graph import TailGraph, blocks_swapped, by_block, joined_cut

#: Ops of whose inputs only type and shape matter.
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"})
_LOSS = "loss"
#: The most bytes of outputs of a batch that a loss is tried on, and that coefficients are computed of.
_MOST_BYTES = 1 << 28
#: How often losses are compared on made-up arguments.
_TRIALS = 4
#: What rounding may make of a number, relative to it, where it is more than in float32.
_ROUNDING = {tf.float16: 4e-3, tf.bfloat16: 3e-2}


@dataclass(frozen=True)
class CallCoefficients:
    """How a call of `tf.GradientTape.gradient` takes the gradient of a whole batch's loss.

    Args:
        number: of the call in the step.
        tensors: names of the tensors whose gradients are taken, in the graph of a microbatch.
        constants: by position of a tensor that counts the same in every batch, and is the same for all samples: what
            it counts.
        shared: positions of other tensors that are the same for all samples. Their coefficients are given with a row
            a sample, all alike.
        follows_model: whether coefficients depend on what the model gives for the batch.
        blocks: by position of a tensor of several blocks of rows, how many. Its coefficients are given as (samples,
            blocks, ...).
    """

    number: int
    tensors: tuple[str, ...]
    constants: Mapping[int, np.ndarray]
    shared: frozenset[int] = frozenset()
    follows_model: bool = False
    blocks: Mapping[int, int] = field(default_factory=dict)


class LossCoefficients:
    """The coefficients of a step's losses, for batches of one structure.

    Args:
        part: the step as it is traced for a microbatch.
        whole: the same, traced for all samples of a batch.
        rows: what the tensors of the whole batch's graph are made of.
        samples: of the whole batch, and which of them this replica has.
        weighed: numbers of the calls that batches of another structure have shown to need coefficients; None where
            this is the first.

    Raises:
        StepError: a loss needs coefficients, and in batches of this structure has none.
    """

    def __init__(
        self,
        part: NotedTrace,
        whole: NotedTrace,
        rows: SampleRows,
        samples: OwnSamples,
        *,
        weighed: Collection[int] | None = None,
    ) -> None:
        self._samples = self.samples = samples
        self._rows = rows
        #: How the gradients of calls can be taken, by number. Of one replica, only of those that need it.
        self.possible: dict[int, tuple[CallCoefficients, _Coefficients]] = {}
        #: Numbers of other calls, where nothing tells how their losses count samples.
        self.unknown: list[int] = []
        needed = []
        for number in range(len(whole.calls.targets)):
            if weighed is not None and number not in weighed:
                continue
            is_plain = whole.calls.is_plain[number] and part.calls.is_plain[number]
            found = _coefficients(part, whole, number, rows) if is_plain else None
            if found is None or found[0].nbytes(samples.total) > _MOST_BYTES:
                self.unknown.append(number)
                continue
            is_needed = weighed is not None or not _is_average(*found, rows, samples)
            if not is_needed and len(samples.sizes) == 1:
                continue
            call = self._call(number, part.trace.lowered.graph, found[0])
            if call is not None:
                self.possible[number] = call, found[0]
                needed += [number] if is_needed else []
            elif is_needed:
                self.unknown.append(number)
        self.take(needed)
        if weighed is not None and set(needed) != set(weighed):
            raise StepError(
                f"A loss counts the samples of a batch of {samples.total} in another way than those of the batches "
                f"before: what each counts cannot be told ahead. Use batches of one size (drop_remainder=True)."
            )

    def take(self, numbers: Collection[int]) -> None:
        """Chooses the calls that need coefficients.

        Args:
            numbers: of calls for which they are possible.
        """
        #: The calls whose losses microbatches do not average to that of the batch.
        self.calls: list[CallCoefficients] = [self.possible[number][0] for number in sorted(numbers)]
        self._functions = [self.possible[number][1] for number in sorted(numbers)]

    def arguments_of(self, number: int) -> frozenset[int]:
        """Returns the arguments that hold samples and go into the coefficients of a call.

        Args:
            number: of the call.
        """
        return frozenset(n for n in self.possible[number][1].arguments if self._rows.holds_samples(n))

    def _call(self, number: int, graph: OpGraph, function: _Coefficients) -> CallCoefficients | None:
        """Returns how the gradient of a call is taken; None where coefficients cannot be given to microbatches."""
        cuts, follows = function.tail.cuts, function.depend_on_model()
        fixed = {place for place, cut in enumerate(cuts) if cut.axis is None}
        repeated = sum(graph.type_of(cuts[place].part).nbytes() for place in fixed if not function.is_constant(place))
        if any(cut.axis for cut in cuts) or repeated * self._samples.count > _MOST_BYTES:
            return None
        if follows:
            try:
                needed_alone(graph, [cut.part for cut in cuts])
            except NotAloneError:
                return None
        names = tuple(f"{graph.nodes[cut.part.node].name}:{cut.part.index}" for cut in cuts)
        made = {n: made_up(spec, np.random.RandomState(0)) for n, spec in function.arguments.items()}
        values = function(made, function.zeros(self._samples.total))
        constants = {place: values[place].numpy() for place in fixed if function.is_constant(place)}
        blocks = {place: cut.blocks for place, cut in enumerate(cuts) if cut.blocks > 1}
        return CallCoefficients(number, names, constants, frozenset(fixed - constants.keys()), follows, blocks)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Returns the names of the tensors of a microbatch that coefficients are computed of, call by call."""
        return tuple(name for call in self.calls if call.follows_model for name in call.tensors)

    def joined(self, outputs: Sequence[StepOutput]) -> list[tf.Tensor]:
        """Returns the tensors of `outputs` for the whole batch. All replicas call it together.

        Args:
            outputs: the tensors of all microbatches of this replica.
        """
        cuts = [
            cut
            for call, function in zip(self.calls, self._functions, strict=True)
            if call.follows_model
            for cut in function.tail.cuts
        ]
        own = [joined_cut(cut, output.outputs) for cut, output in zip(cuts, outputs, strict=True)]
        return join_cuts(cuts, own, self._samples.count, "smp_outputs_of_all")

    def of(self, arguments: Sequence[Any], outputs: Sequence[tf.Tensor] | None = None) -> list[tf.Tensor]:
        """Returns the coefficients for a batch, call by call: a row for each sample. All replicas call it together.

        Args:
            arguments: the step's tensor arguments, composite ones in parts; of this replica.
            outputs: the tensors of `outputs` for the whole batch; None for coefficients that are of the right types,
                and hold nothing of use.
        """
        found: list[tf.Tensor] = []
        left, own = iter(outputs or ()), self._samples
        held = sorted({n for call in self.calls for n in self.arguments_of(call.number)})
        of_all = join_rows([(arguments[number], 0) for number in held], own.count, "smp_arguments_of_all")
        given_to_all = {**dict(enumerate(arguments)), **dict(zip(held, of_all, strict=True))}
        for call, function in zip(self.calls, self._functions, strict=True):
            given = function.zeros(own.total)
            if call.follows_model and outputs is not None:
                given = [next(left) for _ in given]
            values = function({number: given_to_all[number] for number in function.arguments}, given)
            found += [
                self._by_sample(call, place, value) for place, value in enumerate(values) if place not in call.constants
            ]
        return found

    def _by_sample(self, call: CallCoefficients, place: int, value: tf.Tensor) -> tf.Tensor:
        """Returns the coefficients of a tensor with a row a sample."""
        if place in call.shared:
            return tf.repeat(value[tf.newaxis], self._samples.count, axis=0)
        by_sample = blocks_swapped(by_block(value, call.blocks[place])) if place in call.blocks else value
        return self._samples.rows_of(by_sample)


class _Coefficients:
    """The gradient of a loss by the tensors where its tail begins, as a function of arguments.

    Args:
        traced: the step.
        tail: the loss's tail.
    """

    def __init__(self, traced: StepTrace, tail: Tail) -> None:
        self.tail = tail
        self.graph = traced.lowered.graph
        tail_graph = TailGraph(traced, tail)
        #: By number of an argument that it reads, its type.
        self.arguments = self.specs_of(tail.arguments)

        # Variables of the script, such as a counter, that the loss reads or writes. The step itself writes them.
        read = {node.source for node in map(self.graph.nodes.__getitem__, tail.nodes) if node.op == VARIABLE}
        self._variables = {index: v for index, v in enumerate(traced.lowered.variables) if index in read}
        self._copies = {index: tf.Variable(variable) for index, variable in self._variables.items()}

        def gradients(values: list[tf.Tensor], arguments: list[tf.Tensor]) -> list[tf.Tensor]:
            results = tail_graph.write(values, dict(zip(self.arguments, arguments, strict=True)), self._copies)
            loss = tf.add_n([tf.reduce_sum(value) for value in results[_LOSS]])
            found = tf.gradients(loss, values)
            return [
                tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)
                for value, gradient in zip(values, found, strict=True)
            ]

        self._function = tf.function(gradients, autograph=False).get_concrete_function(
            [self._spec(tensor) for tensor in (*(cut.whole for cut in tail.cuts), *tail.shapes)],
            list(self.arguments.values()),
        )

    def __call__(
        self, arguments: Mapping[int, Any], values: Sequence[Any], states: Mapping[Any, Any] | None = None
    ) -> list[tf.Tensor]:
        """Returns the coefficients.

        Args:
            arguments: the step's tensor arguments, by number.
            values: the tensors where the tail begins; anything where nothing depends on what they hold.
            states: what variables of the script hold, by their references; None for what they hold now.
        """
        given = [tf.cast(arguments[number], spec.dtype) for number, spec in self.arguments.items()]
        for index, variable in self._variables.items():
            self._copies[index].assign(variable if states is None else states[variable.ref()])
        return list(self._function(*map(tf.convert_to_tensor, values), *given))

    def specs_of(self, arguments: Collection[int]) -> dict[int, tf.TensorSpec]:
        """Returns types of arguments of the step by their numbers.

        Args:
            arguments: their numbers. Some of another size's trace may be known from shapes alone here: of ones in the
                shape of `y`, `y` is read where its length is open.
        """
        nodes = {node.source: number for number, node in enumerate(self.graph.nodes) if node.op == ARGUMENT}
        return {number: self._spec(Tensor(nodes[number], 0)) for number in sorted(arguments)}

    def specs(self, samples: int) -> list[tf.TensorSpec]:
        """Returns the types of the tensors where the tail begins.

        Args:
            samples: how many samples there are.
        """
        found = []
        for cut in self.tail.cuts:
            kind = self.graph.type_of(cut.whole)
            shape = list(kind.shape or ())
            if cut.axis is not None and shape[cut.axis] is None:
                shape[cut.axis] = samples * cut.blocks
            found.append(tf.TensorSpec(shape, kind.dtype))
        return found

    def shapes(self, whole: OpGraph, share: Fraction) -> list[np.ndarray]:
        """Returns the shapes that a microbatch's tail begins at, besides its tensors.

        Args:
            whole: the whole batch's graph, in which every length is known.
            share: of the samples, the part that is in the microbatch. An open length is this part of what it is there.
        """
        found = []
        for tensor, shape in self.tail.shapes.items():
            of = self.graph.nodes[tensor.node].inputs[0]
            there = whole.type_of(Tensor(whole.number_of[self.graph.nodes[of.node].name], of.index)).shape or ()
            if [None if d is None else w for d, w in zip(shape, there, strict=False)] != list(shape):
                raise LookupError(f"{self.graph.nodes[of.node].name!r} is another tensor in the whole batch's graph")
            values = [int((w or 0) * share) if d is None else d for d, w in zip(shape, there, strict=True)]
            found.append(np.array(values, self.graph.type_of(tensor).dtype))
        return found

    @property
    def variables(self) -> list[tf.Variable]:
        """Returns the variables of the script that coefficients may depend on."""
        return list(self._variables.values())

    @property
    def compared_with(self) -> tuple[float, ...]:
        """Returns the numbers that the loss compares something with."""
        return compared_with(self.graph, self.tail.nodes)

    def nbytes(self, samples: int) -> int:
        """Returns the bytes of the tensors where the tail begins.

        Args:
            samples: how many samples there are.
        """
        kinds = [self.graph.type_of(cut.whole) for cut in self.tail.cuts]
        return sum(kind.nbytes(samples) for kind in kinds)

    def zeros(self, samples: int) -> list[tf.Tensor]:
        """Returns zeros of the types of the tensors where the tail begins.

        Args:
            samples: how many samples there are.
        """
        return [tf.zeros(spec.shape, spec.dtype) for spec in self.specs(samples)]

    def depend_on_model(self) -> bool:
        """Returns whether a coefficient depends on what the model computes."""
        return bool(self._reached(range(len(self.tail.cuts))) & set(range(len(self.tail.cuts))))

    def is_constant(self, place: int) -> bool:
        """Returns whether the coefficient of a tensor depends on nothing.

        Args:
            place: the tensor, by its place among the tail's cuts.
        """
        return not self._reached([place])

    def _reached(self, places: Iterable[int]) -> set[int]:
        """Returns which of the function's inputs, variables among them, the values of some of its outputs depend on."""
        graph = self._function.graph
        position = {tensor.op.name: number for number, tensor in enumerate(graph.inputs)}
        stack = [graph.outputs[place].op for place in places]
        seen: set[str] = set()
        while stack:
            op = stack.pop()
            if op.name not in seen:
                seen.add(op.name)
                if op.type not in _SHAPES:
                    stack.extend(tensor.op for tensor in op.inputs)
        return {position[name] for name in seen if name in position}

    def _spec(self, tensor: Tensor) -> tf.TensorSpec:
        kind = self.graph.type_of(tensor)
        return tf.TensorSpec(kind.shape, kind.dtype)


def _coefficients(
    part: NotedTrace, whole: NotedTrace, number: int, rows: SampleRows
) -> tuple[_Coefficients, _Coefficients] | None:
    """Returns the coefficients of a call's loss for the whole batch, and those that a microbatch has it count.

    None where it has none: it begins at nothing that holds samples, or is computed of what is made at random.
    """
    graph, own = whole.trace.lowered.graph, part.trace.lowered.graph
    targets, in_part = ([noted.trace.tensor_of(t) for t in noted.calls.targets[number]] for noted in (whole, part))
    tail = find_tail(graph, rows, {_LOSS: targets}, begins_at_model=True)
    if tail.left_out or not tail.cuts or len(in_part) != len(targets):
        return None
    cuts = tuple(dataclasses.replace(cut, whole=cut.part) for cut in tail.cuts)
    of_batch = _Coefficients(whole.trace, tail)
    of_microbatch = _Coefficients(part.trace, tail_from(own, cuts, {_LOSS: tuple(in_part)}))
    return of_batch, of_microbatch


def _is_average(of_batch: _Coefficients, of_microbatch: _Coefficients, rows: SampleRows, samples: OwnSamples) -> bool:
    """Returns whether what microbatches count on their own averages to what the batch counts, on made-up values."""
    cuts, finite = of_batch.tail.cuts, False
    specs = of_batch.specs_of({*of_batch.arguments, *of_microbatch.arguments})
    for seed in range(_TRIALS):
        random = np.random.RandomState(seed)
        among = of_batch.compared_with if seed >= _TRIALS // 2 else ()
        made = {number: made_up(spec, random, among=among) for number, spec in specs.items()}
        states = {
            v.ref(): made_up(tf.TensorSpec(v.shape, v.dtype), random)
            for v in of_batch.variables + of_microbatch.variables
        }
        # Outputs may be of any sign, as logits are, or probabilities.
        values = [made_up(spec, random, is_share=seed % 2 == 1) for spec in of_batch.specs(samples.total)]
        try:
            whole = [value.numpy() for value in of_batch(made, values, states)]
        except tf.errors.OpError:
            if not among:
                raise
            continue  # Something that is compared cannot be one of these numbers, such as the number of a class.
        finite |= all(np.isfinite(value).all() for value in whole)
        begin = samples.begin
        for size in samples.parts:
            own = {n: v[begin : begin + size] if rows.holds_samples(n) else v for n, v in made.items()}
            at = [[b * samples.total + n for b in range(c.blocks) for n in range(begin, begin + size)] for c in cuts]
            given = [v if c.axis is None else np.take(v, i, c.axis) for c, v, i in zip(cuts, values, at, strict=True)]
            given += of_microbatch.shapes(of_batch.graph, Fraction(size, samples.total))
            for cut, of_all, of_part, rows_of in zip(cuts, whole, of_microbatch(own, given, states), at, strict=False):
                wanted, found = of_all, of_part.numpy()
                if cut.axis is not None:
                    wanted, found = np.take(of_all, rows_of, cut.axis) * samples.total, found * size
                if not _is_alike(wanted, found):
                    return False
            begin += size
    return finite


def _is_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays are the same but for rounding."""
    rounding = _ROUNDING.get(tf.as_dtype(one.dtype), 1e-4)
    one, other = one.astype(np.float64), other.astype(np.float64)
    most = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
    return np.allclose(one, other, rtol=rounding, atol=1e-2 * rounding * most, equal_nan=True)

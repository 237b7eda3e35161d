"""The gradient of a loss by the tensors where its tail begins, as a function of a step's arguments.

tf.reduce_sum(each * mask) / tf.reduce_sum(mask)      by `each`: mask / (what the mask leaves of the batch)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.partition.graph.op_graph import ARGUMENT, VARIABLE, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import RANDOM_OPS
from smp_tf.partition.samples.batch_tail import Tail, find_tail, tail_from
from smp_tf.partition.samples.rows_of_any_size import RowsOfAnySize
from smp_tf.partition.samples.sample_rows import SampleRows
from smp_tf.steps.trace import StepTrace
from smp_tf.tf_internals import make_plain_variable
from smp_tf.whole_batch.made_up_values import compared_with, made_up
from smp_tf.whole_batch.noted_trace import NotedTrace
from smp_tf.whole_batch.tail_graph import TailGraph

#: Ops of whose inputs only type and shape matter.
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"})
_LOSS = "loss"


class LossGradient:
    """The gradient of a loss by the tensors where its tail begins, as a function of arguments.

    Args:
        traced: the step.
        tail: the loss's tail.
        sized: the same gradient for batches of one size, where this one is for batches of any size.
    """

    def __init__(self, traced: StepTrace, tail: Tail, sized: LossGradient | None = None) -> None:
        self.tail = tail
        self._is_open = sized is not None
        #: The same for batches of one size, which is this gradient itself where it is for these.
        self.sized: LossGradient = sized or self
        self.graph = traced.lowered.graph
        tail_graph = TailGraph(traced, tail)
        #: By number of an argument that it reads, its type.
        self.arguments = self.specs_of(tail.arguments)

        # Variables of the script, such as a counter, that the loss reads or writes. The step itself writes them.
        read = {node.source for node in map(self.graph.nodes.__getitem__, tail.nodes) if node.op == VARIABLE}
        self._variables = {index: v for index, v in enumerate(traced.lowered.variables) if index in read}
        # They are no variables of a function of the script that calls the step.
        self._copies = {
            index: make_plain_variable(initial_value=variable, trainable=False)
            for index, variable in self._variables.items()
        }

        def gradients(values: list[tf.Tensor], arguments: list[tf.Tensor]) -> list[tf.Tensor]:
            results = tail_graph.write(values, dict(zip(self.arguments, arguments, strict=True)), self._copies)
            loss = tf.add_n([tf.reduce_sum(value) for value in results[_LOSS]])
            of_cuts = values[: len(tail.cuts)]
            return [
                tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)
                for value, gradient in zip(of_cuts, tf.gradients(loss, of_cuts), strict=True)
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
            arguments: their numbers. The gradient may read none of some: where lengths are known, ones in the shape of
                `y` are a constant.
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

    def shapes(self, whole: OpGraph, samples: Any, of: int) -> list[Any]:
        """Returns the shapes that the tail begins at, besides its tensors.

        Args:
            whole: the whole batch's graph, in which every length is known.
            samples: how many samples there are, a number or a scalar. An open length is as much longer, or shorter,
                than in `whole`.
            of: how many samples there are in `whole`.
        """
        found = []
        for tensor, shape in self.tail.shapes.items():
            before = self.graph.nodes[tensor.node].inputs[0]
            name = self.graph.nodes[before.node].name
            there = whole.type_of(Tensor(whole.number_of[name], before.index)).shape or ()
            if [None if d is None else w for d, w in zip(shape, there, strict=False)] != list(shape):
                raise LookupError(f"{name!r} is another tensor in the whole batch's graph")
            lengths = [(w or 0) * samples // of if d is None else d for d, w in zip(shape, there, strict=True)]
            found.append(tf.cast(tf.stack(lengths), self.graph.type_of(tensor).dtype))
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

    def zeros(self, samples: Any) -> list[tf.Tensor]:
        """Returns zeros of the types of the tensors where the tail begins.

        Args:
            samples: how many samples there are, a number or a scalar.
        """
        found = []
        for cut in self.sized.tail.cuts:
            kind = self.sized.graph.type_of(cut.whole)
            shape: list[Any] = list(kind.shape or ())
            if cut.axis is not None:
                shape[cut.axis] = samples * cut.blocks
            found.append(tf.zeros(shape, kind.dtype))
        return found

    def lengths(self, samples: Any, of: int) -> list[Any]:
        """Returns the shapes that the tail begins at, besides its tensors, for batches of any size.

        Args:
            samples: how many samples there are, a number or a scalar.
            of: how many there are where the batch is of one size.
        """
        return self.shapes(self.sized.graph, samples, of)

    def depend_on_model(self) -> bool:
        """Returns whether a coefficient depends on what the model computes."""
        return bool(self._reached(range(len(self.tail.cuts))) & set(range(len(self.tail.cuts))))

    def constants(self, samples: int) -> dict[int, np.ndarray]:
        """Returns what tensors count that are the same for all samples, where it is the same in every batch, by place.

        Args:
            samples: how many samples there are.
        """
        fixed = (place for place, cut in enumerate(self.tail.cuts) if cut.axis is None)
        places = [place for place in fixed if not self._reached([place])]
        if not places:
            return {}
        # It may still depend on lengths, which differ where the number of samples is open.
        one = self._of_made_up(samples, 1)
        other = self._of_made_up(samples, 2) if self._is_open else one
        return {place: one[place] for place in places if np.array_equal(one[place], other[place])}

    def _of_made_up(self, samples: int, times: int) -> list[np.ndarray]:
        """Returns the coefficients for made-up arguments of several times as many samples."""
        sized, made = self.sized.specs_of(self.arguments), {}
        for number, spec in self.arguments.items():
            lengths = zip(spec.shape, sized[number].shape, strict=True)
            shape = [known * (times if length is None else 1) for length, known in lengths]
            made[number] = made_up(tf.TensorSpec(shape, spec.dtype), np.random.RandomState(0))
        given = [*self.zeros(samples * times), *self.lengths(samples * times, samples)]
        return [value.numpy() for value in self(made, given)]

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


def loss_gradients(
    part: NotedTrace, whole: NotedTrace, number: int, rows: SampleRows
) -> tuple[LossGradient, LossGradient] | None:
    """Returns the gradient of a call's loss for the whole batch, and the one that a microbatch has of it.

    Args:
        part: the step as it is traced for a microbatch.
        whole: the same, traced for all samples of a batch.
        number: of the call.
        rows: what the tensors of `whole` are made of.

    Returns:
        Both; None where the loss begins at nothing that holds samples, or is computed of what is made at random.
    """
    graph, own = whole.trace.lowered.graph, part.trace.lowered.graph
    targets, in_part = ([noted.trace.tensor_of(t) for t in noted.calls.targets[number]] for noted in (whole, part))
    tail = find_tail(graph, rows, {_LOSS: targets}, begins_at_model=True)
    if tail.left_out or not tail.cuts or len(in_part) != len(targets):
        return None
    cuts = tuple(dataclasses.replace(cut, whole=cut.part) for cut in tail.cuts)
    of_batch = LossGradient(whole.trace, tail)
    of_microbatch = LossGradient(part.trace, tail_from(own, cuts, {_LOSS: tuple(in_part)}))
    return of_batch, of_microbatch


def gradient_of_any_size(sized: LossGradient, any_size: NotedTrace, number: int, rows: SampleRows) -> LossGradient:
    """Returns the gradient of a call's loss for batches of any size.

    Args:
        sized: the same for batches of one size.
        any_size: the step as it is traced without the number of samples.
        number: of the call.
        rows: what the tensors of the step are made of that is traced for batches of one size.

    Raises:
        LookupError: without the number, the loss is computed of something else.
    """
    graph = any_size.trace.lowered.graph
    by_name = RowsOfAnySize(rows, sized.graph, graph)
    cuts = []
    for cut in sized.tail.cuts:
        same = Tensor(graph.number_of[sized.graph.nodes[cut.whole.node].name], cut.whole.index)
        if by_name.in_part(same) != cut.part:
            raise LookupError("without the number of samples, the loss is computed of other tensors")
        cuts.append(dataclasses.replace(cut, whole=same))
    targets = tuple(any_size.trace.tensor_of(tensor) for tensor in any_size.calls.targets[number])
    tail = tail_from(graph, cuts, {_LOSS: targets})
    for node in map(graph.nodes.__getitem__, tail.nodes):
        is_weight = node.op == VARIABLE and node.source is not None and graph.variables[node.source].in_model
        if is_weight or node.op in RANDOM_OPS:
            raise LookupError(f"without the number of samples, the loss depends on op {node.name!r}")
    return LossGradient(any_size.trace, tail, sized)

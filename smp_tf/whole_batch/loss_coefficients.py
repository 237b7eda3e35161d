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

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.batch.output import StepOutput
from smp_tf.errors import StepError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.samples.sample_rows import SampleRows
from smp_tf.whole_batch.forward_alone import NotAloneError, needed_alone
from smp_tf.whole_batch.joined_tail import join_cuts, join_rows
from smp_tf.whole_batch.loss_gradient import LossGradient, gradient_of_any_size, loss_gradients
from smp_tf.whole_batch.loss_trial import is_average
from smp_tf.whole_batch.noted_trace import NotedTrace
from smp_tf.whole_batch.own_samples import GatheredSamples, OwnSamples, message_order
from smp_tf.whole_batch.tail_graph import blocks_swapped, by_block, joined_cut

#: The most bytes of outputs of a batch that a loss is tried on, and that coefficients are computed of.
_MOST_BYTES = 1 << 28


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
        any_size: the step as it is traced without the number of samples, where replicas have batches of any size.

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
        any_size: NotedTrace | None = None,
    ) -> None:
        self.samples = samples
        #: Whether they can be computed for batches of any size, and not only for as many samples as in `samples`.
        self.are_of_any_size = any_size is not None
        self._traced_for = samples.total
        self._rows = rows
        #: How the gradients of calls can be taken, by number. Of one replica, only of those that need it.
        self.possible: dict[int, tuple[CallCoefficients, LossGradient]] = {}
        #: Numbers of other calls, where nothing tells how their losses count samples.
        self.unknown: list[int] = []
        needed = []
        for number in range(len(whole.calls.targets)):
            if weighed is not None and number not in weighed:
                continue
            is_plain = whole.calls.is_plain[number] and part.calls.is_plain[number]
            found = loss_gradients(part, whole, number, rows) if is_plain else None
            if found is None or found[0].nbytes(samples.total) > _MOST_BYTES:
                self.unknown.append(number)
                continue
            is_needed = weighed is not None or not is_average(*found, rows, samples)
            if not is_needed and len(samples.sizes) == 1:
                continue
            function = found[0] if any_size is None else gradient_of_any_size(found[0], any_size, number, rows)
            call = self._call(number, part.trace.lowered.graph, function)
            if call is not None:
                self.possible[number] = call, function
                needed += [number] if is_needed else []
            elif is_needed:
                self.unknown.append(number)
        self.take(needed)
        if weighed is not None and set(needed) != set(weighed):
            raise StepError(
                f"A loss counts the samples of a batch of {samples.total} in another way than those of the batches "
                f"before: what each counts cannot be told ahead. Use batches of one size (drop_remainder=True)."
            )

    def for_samples(self, samples: OwnSamples) -> LossCoefficients | None:
        """Returns the same for batches of other sizes; None where the step has to be traced for these.

        Args:
            samples: of such a batch, and which of them this replica has.
        """
        # What a larger batch takes may be too much.
        if not self.are_of_any_size or samples.total > self._traced_for:
            return None
        found = copy.copy(self)
        found.samples = samples
        return found

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
        return frozenset(n for n in self.possible[number][1].arguments if self._rows.sample_axis(n) is not None)

    def _call(self, number: int, graph: OpGraph, function: LossGradient) -> CallCoefficients | None:
        """Returns how the gradient of a call is taken; None where coefficients cannot be given to microbatches."""
        cuts, follows = function.tail.cuts, function.depend_on_model()
        fixed = {place for place, cut in enumerate(cuts) if cut.axis is None}
        constants = function.constants(self.samples.total)
        repeated = sum(graph.type_of(cuts[place].part).nbytes() for place in fixed - constants.keys())
        if any(cut.axis for cut in cuts) or repeated * self.samples.count > _MOST_BYTES:
            return None
        if follows:
            try:
                needed_alone(graph, [cut.part for cut in cuts])
            except NotAloneError:
                return None
        names = tuple(f"{graph.nodes[cut.part.node].name}:{cut.part.index}" for cut in cuts)
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
        return join_cuts(cuts, own, self.samples.count, "smp_outputs_of_all", handles=message_order())

    def of(
        self,
        arguments: Sequence[Any],
        outputs: Sequence[tf.Tensor] | None = None,
        own: OwnSamples | GatheredSamples | None = None,
    ) -> list[tf.Tensor]:
        """Returns the coefficients for a batch, call by call: a row for each sample. All replicas call it together.

        Args:
            arguments: the step's tensor arguments, composite ones in parts; of this replica.
            outputs: the tensors of `outputs` for the whole batch; None where there are none.
            own: which samples of the whole batch this replica has; None where these are `samples`.
        """
        found: list[tf.Tensor] = []
        left, own = iter(outputs or ()), own or self.samples
        held = sorted({n for call in self.calls for n in self.arguments_of(call.number)})
        rows = [(arguments[number], self._rows.sample_axis(number) or 0) for number in held]
        of_all = join_rows(rows, own.count, "smp_arguments_of_all", message_order())
        given_to_all = {**dict(enumerate(arguments)), **dict(zip(held, of_all, strict=True))}
        for call, function in zip(self.calls, self._functions, strict=True):
            given = function.zeros(own.total)
            if call.follows_model and outputs is not None:
                given = [next(left) for _ in given]
            given = [*given, *function.lengths(own.total, self._traced_for)]
            values = function({number: given_to_all[number] for number in function.arguments}, given)
            found += [
                self._by_sample(call, place, value, own)
                for place, value in enumerate(values)
                if place not in call.constants
            ]
        return found

    def empty(self) -> list[tf.Tensor]:
        """Returns coefficients that are of the right types, and hold nothing of use."""
        own = OwnSamples((self.samples.count,), 0, self.samples.microbatches)
        return [
            self._by_sample(call, place, value, own)
            for call, function in zip(self.calls, self._functions, strict=True)
            for place, value in enumerate(function.zeros(own.count))
            if place not in call.constants
        ]

    def _by_sample(
        self, call: CallCoefficients, place: int, value: tf.Tensor, own: OwnSamples | GatheredSamples
    ) -> tf.Tensor:
        """Returns the coefficients of a tensor with a row a sample."""
        if place in call.shared:
            return tf.repeat(value[tf.newaxis], own.count, axis=0)
        by_sample = blocks_swapped(by_block(value, call.blocks[place])) if place in call.blocks else value
        return own.rows_of(by_sample)

    @property
    def key(self) -> list[Any]:
        """Returns what has to be the same on all replicas, as JSON holds it."""
        return [
            [
                *(call.number, call.tensors, call.follows_model, sorted(self.arguments_of(call.number))),
                *(sorted(call.constants), sorted(call.shared), sorted(call.blocks.items())),
            ]
            for call in self.calls
        ]

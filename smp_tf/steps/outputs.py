"""The outputs of a step's program. They are described once, when it is built, and filled with each batch's tensors.

          program is built                      each call
loss      made by stage 1, on all ranks    ┐    ┌ values of the microbatches      ┐
gradient  stage 0's, averaged, rows 0-48   ┴──▶ ┴ sum and its weight              ┴──▶ StepOutput, in the structure
                                                                                       that the function returns
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf.batch.output import StepOutput, WeightedSum
from smp_tf.batch.output_description import GradientSum, OutputDescription, OutputHolder
from smp_tf.batch.results import ResultStructure
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.partition.split.split import Split
from smp_tf.partition.split.step_outputs import Delivery
from smp_tf.partition.spread import EVERYWHERE, Partial, Spread
from smp_tf.partition.trace.lower import Lowered, OutputSlot
from smp_tf.replicas import unaveraged
from smp_tf.replicas.gradient_marks import Computed
from smp_tf.replicas.reduce_scatter import Receiver
from smp_tf.variables.host_offload import device_of_gradients


@dataclass(frozen=True, eq=False)
class FlatOutputs:
    """The results of a program, by output.

    Args:
        values: for each output, one tensor per microbatch, or None.
        accumulated: for each output, the sum over microbatches (and replicas) of weight x value, or None.
        weights: weight of each microbatch of this replica.
        total_weight: sum of the weights in `accumulated`.
        computed: where `accumulated` was made in the graph of the program, by output.
    """

    values: list[list[tf.Tensor] | None]
    accumulated: list[tf.Tensor | None]
    weights: Sequence[Any]
    total_weight: Any
    computed: Mapping[int, Computed] = field(default_factory=dict)

    def tensors(self) -> list[tf.Tensor]:
        """Returns all tensors, for a function to return."""
        found = [tensor for values in self.values if values is not None for tensor in values]
        found += [tensor for tensor in self.accumulated if tensor is not None]
        return found + [w for w in (*self.weights, self.total_weight) if isinstance(w, tf.Tensor)]

    def filled(self, tensors: Iterable[tf.Tensor]) -> FlatOutputs:
        """Returns the same results with other tensors, in the order of `tensors()`."""
        left = iter(tensors)
        values = [None if v is None else [next(left) for _ in v] for v in self.values]
        accumulated = [None if t is None else next(left) for t in self.accumulated]
        weights = [next(left) if isinstance(w, tf.Tensor) else w for w in self.weights]
        total = next(left) if isinstance(self.total_weight, tf.Tensor) else self.total_weight
        return FlatOutputs(values, accumulated, weights, total)

    def parts(self, slot: OutputSlot) -> list[Any] | None:
        """Returns the values of a result, one per microbatch; None where this rank does not have them.

        Args:
            slot: the result. The values of a composite tensor are put together.
        """
        if slot.spec is None:
            return self.values[slot.outputs[0]]
        return packed(slot, [self.values[i] for i in slot.outputs])

    def sum_of(self, slot: OutputSlot) -> WeightedSum | None:
        """Returns the sum of a result over the microbatches; None where it was not accumulated, or is on another rank.

        Args:
            slot: which result.
        """
        first = slot.outputs[0]
        total: Any = self.accumulated[first]
        if slot.spec is not None:
            sums = [self.accumulated[i] for i in slot.outputs]
            is_there = all(part is not None for part in sums)
            total = tf.nest.pack_sequence_as(slot.spec, sums, expand_composites=True) if is_there else None
        return None if total is None else WeightedSum(total, self.total_weight, self.computed.get(first))


def packed(slot: OutputSlot, parts: Sequence[list[tf.Tensor] | None]) -> list[Any] | None:
    """Returns the values of a composite tensor, one per microbatch; None where this rank does not have them.

    Args:
        slot: the tensor.
        parts: the tensors that it is made of, each with a value per microbatch.
    """
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        return None
    return [
        tf.nest.pack_sequence_as(slot.spec, list(tensors), expand_composites=True)
        for tensors in zip(*present, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class DescribedOutputs:
    """The outputs of a program, before it has run.

    Args:
        structure: what the step function returns, with a place for each output.
        described: what is known of each output, in the order of the places.
    """

    structure: ResultStructure
    described: tuple[OutputDescription, ...]

    def filled(self, flat: FlatOutputs) -> Any:
        """Returns what the step function returns, with a `StepOutput` in place of every tensor.

        Args:
            flat: the results of the program.
        """
        places = zip(self.structure.slots, self.described, strict=True)
        return self.structure.filled(
            [StepOutput(known, flat.parts(slot), flat.weights, flat.sum_of(slot)) for slot, known in places]
        )


def describe_outputs(
    lowered: Lowered, split: Split, receivers: Mapping[int, Receiver], *, keeps_gradients: bool
) -> DescribedOutputs:
    """Returns what is known of the outputs of a step, on this rank.

    Args:
        lowered: the op graph of its trace.
        split: the step, cut.
        receivers: who alone gets a gradient's sum over the replicas, or rows of it, by output. The others go to all.
        keeps_gradients: whether gradients are kept for each microbatch besides their sum.

    Raises:
        StepError: a composite tensor is made of gradients, and cannot be averaged over the replicas.
    """
    structure = ResultStructure(lowered.results)
    described = []
    for slot in structure.slots:
        first = slot.outputs[0]
        plan, receiver = split.outputs[first], receivers.get(first)
        name = lowered.graph.nodes[lowered.graph.outputs[first].node].name
        gradient = None
        if plan.is_gradient:
            _require_averages(slot, name)
            gradient = _gradient_sum(receiver, keeps_gradients=keeps_gradients)
        holder = _holder(split.stage_of(plan), plan.delivery, receiver)
        described.append(OutputDescription(name, holder, gradient, plan.follows_state))
    return DescribedOutputs(structure, tuple(described))


def _require_averages(slot: OutputSlot, name: str) -> None:
    if slot.spec is None or isinstance(slot.spec, tf.IndexedSlicesSpec) or runtime.current().topology.replicas == 1:
        return
    raise StepError(
        f"{name} is part of a {slot.spec.value_type.__name__} made of gradients. Over replicas, tensors and "
        f"tf.IndexedSlices are averaged. Return one of these from the step, or train with one replica."
    )


def _gradient_sum(receiver: Receiver | None, *, keeps_gradients: bool) -> GradientSum:
    spread: Spread = EVERYWHERE if receiver is None else receiver.spread
    return GradientSum(Partial("D") if unaveraged.are_left() else spread, device_of_gradients(), keeps_gradients)


def _holder(stage: int | None, delivery: Delivery, receiver: Receiver | None) -> OutputHolder:
    topology = runtime.current().topology
    replica = None if receiver is None else receiver.spread.only
    is_sent_here = delivery is not Delivery.LOCAL or stage == topology.stage
    return OutputHolder(stage, replica, is_sent_here and replica in (None, topology.replica))

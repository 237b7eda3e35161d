"""The gradients of a step whose results, such as a norm, are computed once per batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.partition.graph.op_graph import Tensor
from smp_tf.partition.rewrite.state_reads import state_of_gradients
from smp_tf.partition.samples.gradient_uses import meets_states
from smp_tf.partition.samples.once_per_batch import GradientUses, NotOnceError
from smp_tf.partition.trace.lower import OutputSlot
from smp_tf.steps.trace import StepTrace
from smp_tf.whole_batch.noted_trace import NotedTrace


@dataclass(frozen=True, eq=False)
class UsedGradients:
    """The gradients of a step.

    Args:
        uses: what the step makes of them.
        variables: the variable that a gradient is taken by, by what stands for the gradient in the whole batch's graph.
    """

    uses: GradientUses
    variables: Mapping[Tensor, Any]


def applied_name(call: int, number: int) -> str:
    """Returns the name under which a tail gives an optimizer's gradient.

    Args:
        call: number of the call of `apply_gradients`.
        number: number of the gradient in the call.
    """
    return f"applied {call}/{number}"


def gradients_of(noted_part: NotedTrace, noted_whole: NotedTrace) -> UsedGradients:
    """Returns the gradients of a step, and what the step makes of them.

    Args:
        noted_part: the step as it is traced for a microbatch. What it gives to optimizers is under "gradients".
        noted_whole: the same, traced for all samples of a batch, with placeholders for gradients.

    Raises:
        NotOnceError: the step takes gradients that are no dense tensors.
    """
    part, whole = noted_part.trace, noted_whole.trace
    of_part, of_whole = noted_part.calls, noted_whole.calls
    given: dict[Tensor, Tensor] = {}
    variables: dict[Tensor, Any] = {}
    for placeholders, gradients, sources in zip(of_whole.gradients, of_part.gradients, of_part.sources, strict=True):
        for placeholder, gradient, source in zip(placeholders, gradients, sources, strict=True):
            if placeholder is None or gradient is None:
                continue
            if not isinstance(gradient, tf.Tensor):
                raise NotOnceError("a gradient is sparse, and is added up over the microbatches in another form")
            given[whole.tensor_of(placeholder)] = part.tensor_of(gradient)
            variables[whole.tensor_of(placeholder)] = source
    applied: dict[str, tuple[Tensor, Tensor]] = {}
    for call, (ours, theirs) in enumerate(
        zip(whole.lowered.results["gradients"], part.lowered.results["gradients"], strict=True)
    ):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if isinstance(one, OutputSlot) and isinstance(other, OutputSlot):
                applied[applied_name(call, number)] = (
                    whole.lowered.graph.outputs[one.outputs[0]],
                    part.lowered.graph.outputs[other.outputs[0]],
                )
    return UsedGradients(GradientUses(given, applied), variables)


def depend_on_states(traced: StepTrace) -> bool:
    """Returns whether gradients of several stages, or what is made of them, depend on what the step writes.

    That is a variable of the script, such as a momentum. Each stage has it. Where it is written once per batch, after
    the gradients, all of them read the same.

    Args:
        traced: the step as it is traced for a microbatch.
    """
    graph = traced.lowered.graph
    return runtime.current().topology.stages > 1 and (state_of_gradients(graph) is not None or meets_states(graph))

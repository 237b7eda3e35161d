"""The traces of a step for a microbatch and for a whole batch, with the gradients that are taken in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from smp_tf.partition.samples.sample_rows import SampleRows
from smp_tf.steps.trace import StepTrace
from smp_tf.whole_batch.gradient_calls import GradientCalls


@dataclass(frozen=True, eq=False)
class NotedTrace:
    """A trace of a step, and the gradients that are taken in it.

    Args:
        trace: the trace.
        calls: the gradients.
    """

    trace: StepTrace
    calls: GradientCalls


@dataclass(frozen=True, eq=False)
class BatchTraces:
    """The traces of a step.

    Args:
        step: words for the step.
        part: for a microbatch.
        whole: for all samples of a batch, without backward.
        rows: what the tensors of `whole` are made of.
        of_any_size: makes the same trace as `whole` without the number of samples.
    """

    step: str
    part: NotedTrace
    whole: NotedTrace
    rows: SampleRows
    of_any_size: Callable[[], NotedTrace]

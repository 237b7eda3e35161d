"""The traces of a step for a microbatch and for a whole batch, with the gradients that are taken in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from smp_tf.errors import PeerError, RankMismatchError
from smp_tf.partition.samples.sample_rows import SampleRows
from smp_tf.steps.trace import StepTrace
from smp_tf.whole_batch.gradient_calls import UNKNOWN_GRADIENT, GradientCalls

Made = TypeVar("Made")


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


def sample_rows(part: StepTrace, whole: StepTrace, samples: int) -> SampleRows:
    """Returns what the tensors of a step's graph for a whole batch are made of.

    Args:
        part: the step as it is traced for a microbatch.
        whole: the same, traced for all samples of a batch, with placeholders for gradients.
        samples: number of samples.
    """
    graph = whole.lowered.graph
    unknown = frozenset(node.name for node in graph.nodes if UNKNOWN_GRADIENT in node.name)
    return SampleRows(graph, part.lowered.graph, samples, unknown)


def without_size(make: Callable[[], Made]) -> tuple[Made | None, str]:
    """Returns what is made of a trace without the number of samples; None, and why, where that cannot be made.

    Where anything but the open size causes an error, it comes again with the size.

    Args:
        make: traces the step without the number, and makes something of it.

    Raises:
        PeerError: another rank has failed.
        RankMismatchError: ranks differ.
    """
    try:
        return make(), ""
    except (PeerError, RankMismatchError):
        raise
    except Exception as error:
        return None, " ".join(str(error).split())[:300]

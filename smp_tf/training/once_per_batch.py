"""Finds what a step of Keras's loops computes once per batch, from its traces for a microbatch and a whole batch."""

from __future__ import annotations

from typing import Any

from smp_tf.loss_check.check import tell_unchecked
from smp_tf.partition.samples.gradient_uses import meets_states, nonlinear_uses
from smp_tf.partition.samples.once_per_batch import NotOnceError, writers_of_states
from smp_tf.partition.samples.one_microbatch import OneMicrobatch
from smp_tf.partition.samples.sample_rows import Rows
from smp_tf.replicas import unaveraged
from smp_tf.steps.trace import StepTrace
from smp_tf.training.replica_batches import SizesOfReplicas
from smp_tf.whole_batch.batch_results import BatchResults
from smp_tf.whole_batch.noted_trace import BatchTraces, without_size
from smp_tf.whole_batch.used_gradients import gradients_of


def once_per_batch(
    traces: BatchTraces,
    *,
    is_open: bool,
    is_one: bool = False,
    over_replicas: bool = False,
    of_samples: bool = True,
) -> BatchResults:
    """Returns what a step computes once per batch.

    Args:
        traces: the traces of the step.
        is_open: whether batches of other sizes come, too.
        is_one: whether a batch is one microbatch.
        over_replicas: whether the batches of all replicas are one batch.
        of_samples: whether samples may go into it. Otherwise it is made of gradients and weights alone.

    Raises:
        NeedsItsSizesError: without the number of samples, the step computes less once per batch.
    """
    part, whole = traces.part, traces.whole
    rows: Rows = OneMicrobatch(traces.rows, whole.trace.lowered.graph) if is_one else traces.rows
    any_size = traces.of_any_size() if is_open else None
    open_trace = any_size.trace if any_size is not None else None
    graph = part.trace.lowered.graph
    if nonlinear_uses(graph) or meets_states(graph):
        try:
            if unaveraged.are_left():
                raise NotOnceError('with "gradient_compression": "1bit" each replica has gradients of its own')
            given = any_size or whole
            gradients = gradients_of(part, given)
            return BatchResults(
                *(traces.step, part.trace, whole.trace, rows),
                of_any_size=open_trace,
                gradients=gradients,
                over_replicas=over_replicas,
                of_samples=of_samples,
            )
        except NotOnceError as error:
            tell_unchecked(traces.step, f"what it computes of gradients: {error}")
    return BatchResults(
        *(traces.step, part.trace, whole.trace, rows),
        of_any_size=open_trace,
        over_replicas=over_replicas,
        of_samples=of_samples,
    )


def once_over_replicas(traces: BatchTraces, sets: SizesOfReplicas, *, is_open: bool, of_samples: bool) -> BatchResults:
    """Returns what a step computes once for the batches of all replicas.

    Args:
        traces: the traces of the step.
        sets: the sizes of the replicas' batches so far. They are told where the step needs its sizes.
        is_open: whether batches of other sizes come, too.
        of_samples: whether samples may go into it, since those of all replicas can be joined.
    """
    if is_open:
        found, _ = without_size(lambda: once_per_batch(traces, is_open=True, over_replicas=True, of_samples=of_samples))
        if found is not None:
            return found
        sets.all_are_own = True
    return once_per_batch(traces, is_open=False, over_replicas=True, of_samples=of_samples)


def written_states(traced: StepTrace) -> list[Any]:
    """Returns the variables of the script that a step writes.

    Args:
        traced: the step.
    """
    return [traced.lowered.variables[index] for index in writers_of_states(traced.lowered.graph)]

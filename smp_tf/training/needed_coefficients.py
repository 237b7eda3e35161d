"""Tells whether microbatches have to be told what their samples count in a loss, which replicas decide together."""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf

from smp_tf.whole_batch.loss_coefficients import LossCoefficients
from smp_tf.whole_batch.noted_trace import BatchTraces
from smp_tf.whole_batch.own_samples import OwnSamples
from smp_tf.whole_batch.replica_calls import calls_on_replicas


def needed_coefficients(
    traces: BatchTraces, samples: OwnSamples, composites: Collection[int], *, together: bool
) -> LossCoefficients | None:
    """Returns what samples count in losses that microbatches do not average to that of the batch; None for no such one.

    Args:
        traces: the traces of the step.
        samples: of the whole batch, and which of them this replica has.
        composites: the arguments, by number, that are parts of ragged or sparse tensors.
        together: whether all replicas call it together.
    """
    try:
        found = LossCoefficients(traces.part, traces.whole, traces.rows, samples)
    except (TypeError, ValueError, LookupError, tf.errors.OpError):
        # Arguments that cannot be made up, such as text or ragged rows, or an op without a gradient: the check of the
        # first batch says whether microbatches count rightly.
        found = None
    if len(samples.sizes) > 1:
        found = _agreed(traces.step, found, composites) if together else None
    return found if found is not None and found.calls else None


def _agreed(step: str, found: LossCoefficients | None, composites: Collection[int]) -> LossCoefficients | None:
    """Returns the coefficients of all losses that need some on any replica; None where a replica cannot have them."""
    wanted, are_possible = calls_on_replicas(step, found, composites)
    if found is None or not are_possible:
        return None
    found.take(wanted)
    return found

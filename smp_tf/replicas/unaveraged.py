"""Handles gradients that a step leaves unaveraged, for an optimizer that exchanges something else.

    gradient_compression     the step gives                   the optimizer
    none, bf16, fp16         averages over the replicas       any; it sends nothing
    1bit                     this replica's, to be averaged   OneBitAdam, OneBitLAMB: sends gradients during its
                                                              warm-up, and compressed momenta afterwards

They are scaled so that their plain average over the replicas is that of all samples, whatever the shares of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smp_tf.config.keys import ONE_BIT
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.replicas.gradient_marks import comes_from_a_step, mark_of


def are_left() -> bool:
    """Returns whether steps give gradients that are not averaged over the replicas."""
    running = runtime.current_or_none()
    return running is not None and running.config.gradient_compression == ONE_BIT and running.topology.replicas > 1


def require_averaged(gradients: Iterable[Any], what: str) -> None:
    """Raises an error where gradients are from a step that has not averaged them.

    Args:
        gradients: tensors, sparse slices or None.
        what: words for what is about to average them, for the message.

    Raises:
        StepError: one of them is from such a step.
    """
    if are_left() and any(g is not None and not mark_of(g).is_average and comes_from_a_step(g) for g in gradients):
        raise StepError(
            f'With "gradient_compression": "1bit" the gradients of a step are not averaged: smp.OneBitAdam and '
            f"smp.OneBitLAMB do that, with less to send. {what} was given such a gradient. Apply it as it is with one "
            f'of these two; or leave the key out, or say "bf16" or "fp16".'
        )

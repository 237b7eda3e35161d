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

from smp_tf import tf_internals
from smp_tf.config.keys import ONE_BIT
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.replicas.gradient_marks import comes_from_a_step, is_averaged
from smp_tf.variables import store


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
    if are_left() and any(g is not None and not is_averaged(g) and comes_from_a_step(g) for g in gradients):
        raise StepError(
            f'With "gradient_compression": "1bit" the gradients of a step are not averaged: smp.OneBitAdam and '
            f"smp.OneBitLAMB do that, with less to send. {what} was given such a gradient. Apply it as it is with one "
            f'of these two; or leave the key out, or say "bf16" or "fp16".'
        )


def require_fit(optimizer: Any, pairs: Iterable[tuple[Any, Any]], averages: bool) -> None:
    """Raises an error where an optimizer would apply each replica's own gradient, so that weights would drift apart.

    Args:
        optimizer: the optimizer that is about to apply gradients.
        pairs: gradients, or None, and variables.
        averages: whether the optimizer itself averages over the replicas.

    Raises:
        StepError: the optimizer does not average, or cannot do so where it is called.
    """
    if not are_left():
        return
    given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    unaveraged = [
        variable for gradient, variable in given if not is_averaged(gradient) and _is_of_a_step(gradient, variable)
    ]
    if averages and given and tf_internals.is_compiled_by_xla():
        raise StepError(
            "Gradients are applied inside a tf.function with jit_compile=True, and the optimizer averages them over "
            'the replicas ("gradient_compression": "1bit"): XLA cannot compile what passes between these. Leave '
            "jit_compile out of the function that applies gradients; xla=True in the configuration compiles the step."
        )
    if averages or not unaveraged:
        return
    name = type(optimizer).__name__
    if adapter.optimizers().scales_losses(optimizer):
        raise StepError(
            f'With "gradient_compression": "1bit" each replica has gradients of its own, and {name} would decide on '
            f"each by these alone whether to apply them. Apply them without a loss scale: mixed_bfloat16 needs none. "
            f"Or leave the key out."
        )
    raise StepError(
        f'With "gradient_compression": "1bit" gradients come out of a step as each replica has computed them, and '
        f"smp.OneBitAdam or smp.OneBitLAMB averages over the replicas. {name} does not, and was given that of "
        f'{unaveraged[0].name!r}. Use one of these two; or leave the key out, or say "bf16" or "fp16".'
    )


def _is_of_a_step(gradient: Any, variable: Any) -> bool:
    """Returns whether a gradient was made from one that a step has returned. That of a model's weight always was."""
    return store.store_of(variable) is not None or comes_from_a_step(gradient)

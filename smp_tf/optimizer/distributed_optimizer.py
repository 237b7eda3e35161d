"""Lets an optimizer average over the replicas what no step has averaged."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

from smp_tf.errors import StepError
from smp_tf.gradients.average import average_gradients
from smp_tf.keras.optimizer_methods import OWN_APPLY, REPLACED_APPLY
from smp_tf.optimizer import recorded_apply
from smp_tf.sharding import layouts

_Optimizer = TypeVar("_Optimizer")


def DistributedOptimizer(optimizer: _Optimizer) -> _Optimizer:  # noqa: N802
    """Lets an optimizer average the gradients that it applies over the replicas.

    Gradients from `accumulate`, and those of `fit`, are averaged by the step and pass unchanged. Gradients that were
    computed in another way, such as those of a model of the script's own outside any step, are averaged. So one
    optimizer may be given both. What a script makes from averages, such as clipped ones, is averaged once more. That
    changes no value, but costs a message in every step. Let the optimizer clip instead.

    Args:
        optimizer: an optimizer of tf_keras, also a legacy one, or a `LossScaleOptimizer` (wrap it, not the optimizer
            within it).

    Returns:
        The same optimizer. Wrapping it a second time changes nothing.

    Raises:
        StepError: the argument applies no gradients.

    Example:
        >>> optimizer = smp.DistributedOptimizer(tf.keras.optimizers.Adam(1e-3))
        >>> scale = tf.Variable(2.0)
        >>> with tf.GradientTape() as tape:
        ...     penalty = scale**2
        >>> _ = optimizer.apply_gradients([(tape.gradient(penalty, scale), scale)])
    """
    apply = getattr(optimizer, "apply_gradients", None)
    if not callable(apply) or isinstance(optimizer, type):
        raise StepError(
            f"smp.DistributedOptimizer takes an optimizer of tf_keras, such as tf.keras.optimizers.Adam(1e-3). "
            f"Received: {optimizer!r}"
        )
    if hasattr(optimizer, OWN_APPLY):
        return optimizer

    @functools.wraps(apply)
    def apply_gradients(grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if recorded_apply.recorder() is None:
            # Within a step they are those of one microbatch, and the step averages their sum. A weight that a replica
            # alone updates has its gradient from a step, which has averaged it for that replica.
            apart = layouts.are_received_apart()
            todo = [
                place
                for place, (gradient, variable) in enumerate(pairs)
                if gradient is not None and not (apart and layouts.layout_of(variable).slots.only is not None)
            ]
            averaged = average_gradients([pairs[place][0] for place in todo])
            for place, gradient in zip(todo, averaged, strict=True):
                pairs[place] = gradient, pairs[place][1]
        # The method is looked up anew, since distributed models may have been made meanwhile.
        return getattr(optimizer, REPLACED_APPLY)(pairs, *args, **kwargs)

    setattr(optimizer, REPLACED_APPLY, apply)
    setattr(optimizer, OWN_APPLY, apply_gradients)
    optimizer.apply_gradients = apply_gradients  # type: ignore[attr-defined]
    return optimizer

"""What optimizers of tf_keras, old and new, do with gradients, and where smp_tf changes it.

Private pieces work with tf_keras 2.21. tests/smp_tf/keras/test_optimizers.py fails when they change.
"""

from __future__ import annotations

from typing import Any

import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer
from tf_keras.src.optimizers import utils as optimizer_utils

from smp_tf.keras.nadam import begin_step
from smp_tf.keras.protocols import Place, UnknownNameError

__all__ = [
    "base",
    "begin_step",
    "classes_defining",
    "clips_by_all",
    "finiteness_check",
    "follow_schedule",
    "is_own_module",
    "kinds",
    "made",
    "scales_losses",
    "update_loss_scale",
    "usual_aggregator",
]


def is_own_module(name: str) -> bool:
    """Returns whether a module is part of Keras."""
    return name.startswith("tf_keras.")


def base() -> type:
    """Returns the class that all optimizers without their own `__getattribute__` derive from."""
    kind: type = tf_keras.optimizers.Optimizer
    return kind


def classes_defining(method: str) -> list[type]:
    """Returns every class of optimizers, Keras's and the script's, that itself defines a method."""
    found: list[type] = []
    bases = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
    stack: list[type] = [c for kind in bases for c in kind.__mro__ if is_own_module(c.__module__)]
    while stack:
        optimizer = stack.pop()
        if method in optimizer.__dict__ and optimizer not in found:
            found.append(optimizer)
        if issubclass(optimizer, bases):
            stack.extend(optimizer.__subclasses__())
    return found


def scales_losses(optimizer: Any) -> bool:
    """Returns whether an optimizer wraps another one and scales losses for it."""
    return isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)


def finiteness_check() -> Place:
    """Returns the function that says whether all gradients are finite, for optimizers that scale losses."""
    return loss_scale_optimizer, "_is_all_finite"


def clips_by_all(optimizer: Any) -> bool:
    """Returns whether an optimizer scales gradients by the norm of all of them."""
    limit = getattr(optimizer, "global_clipnorm", None)
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return limit is not None
    return limit is not None and limit > 0 and not optimizer.clipnorm


def update_loss_scale(optimizer: Any) -> Any:
    """Changes the loss scale of a `LossScaleOptimizer` as if it were given no gradient at all.

    Returns:
        Whether to apply the gradients of the step, as a bool or a bool tensor.
    """
    return optimizer._loss_scale.update([])[1] if optimizer.dynamic else True


def usual_aggregator() -> Any:
    """Returns what an older optimizer does with all gradients unless it is given a `gradient_aggregator`."""
    return optimizer_utils.all_reduce_sum_gradients


def follow_schedule(optimizer: Any) -> None:
    """Brings the learning rate that a new optimizer with a schedule shows to what its step counter says."""
    if isinstance(optimizer, tf_keras.optimizers.Optimizer):
        optimizer._compute_current_learning_rate()


def kinds() -> dict[str, type]:
    """Returns Keras's classes of optimizers by their names in lower case."""
    found: dict[str, type] = {}
    for name, kind in vars(tf_keras.optimizers).items():
        if isinstance(kind, type) and issubclass(kind, base()) and kind is not base():
            found[name.lower()] = kind
    return found


def made(name: str) -> Any:
    """Returns the optimizer that Keras makes from a name, or from a script's class registered under it.

    Raises:
        UnknownNameError: Keras knows no such name.
    """
    try:
        return tf_keras.optimizers.get(name)
    except ValueError as error:
        # A class that a script has registered may raise it, too.
        if tf_keras.saving.get_registered_object(name) is None:
            raise UnknownNameError(name) from error
        raise

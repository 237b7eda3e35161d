"""Finds optimizers of Keras and smp_tf by their names, and how many slots they keep for a variable."""

from __future__ import annotations

from typing import Any

import tf_keras

from smp_tf.config.files import nearest
from smp_tf.config.values import kind_of
from smp_tf.errors import OfflinePlanError
from smp_tf.keras.optimizer_slots import is_optimizer, slots_of
from smp_tf.offline.user_errors import words_of
from smp_tf.optimizer.one_bit_adam import OneBitAdam
from smp_tf.optimizer.one_bit_lamb import OneBitLAMB


def slots_by_name(optimizer: str) -> float:
    """Returns how many slots an optimizer keeps for a variable, in sizes of the variable.

    Args:
        optimizer: the optimizer's name in `tf.keras.optimizers`, or that of one of smp_tf's.

    Raises:
        OfflinePlanError: there is no such optimizer, or it cannot be made from its name alone.
    """
    found = slots_of(optimizer_by_name(optimizer))
    if found is None:
        raise OfflinePlanError(f"Optimizer {optimizer!r} does not say what it keeps for a variable.")
    return found


def optimizer_by_name(name: str) -> Any:
    """Returns the optimizer with a name, in lower case or spelled like its class.

    Args:
        name: the name of an optimizer in `tf.keras.optimizers` or of smp_tf's.

    Raises:
        OfflinePlanError: there is no such optimizer, or it cannot be made from its name alone.
    """
    kinds: dict[str, Any] = {own.__name__.lower(): own for own in (OneBitAdam, OneBitLAMB)}
    for own_name, kind in vars(tf_keras.optimizers).items():
        # Keras makes some of them from their names, but not all.
        if isinstance(kind, type) and issubclass(kind, tf_keras.optimizers.Optimizer):
            kinds[own_name.lower()] = kind
    del kinds["optimizer"]
    is_known = name.lower() in kinds
    try:
        made = kinds[name.lower()]() if is_known else tf_keras.optimizers.get(name)
    except Exception as error:
        # Keras raises ValueError for an unknown name. A class that a script has registered may raise it, too.
        if isinstance(error, ValueError) and not is_known and tf_keras.saving.get_registered_object(name) is None:
            missing = f"tf.keras.optimizers has no optimizer of the name {name!r}.{nearest(name, kinds)}"
            raise OfflinePlanError(missing) from None
        raise OfflinePlanError(f"Optimizer {name!r} cannot be made of its name alone: {words_of(error)}.") from error
    if not is_optimizer(made):
        raise OfflinePlanError(f"{name!r} must be an optimizer. It is {kind_of(made)}.")
    return made

"""Finds optimizers of Keras and smp_tf by their names, and how many slots they keep for a variable."""

from __future__ import annotations

from typing import Any

from smp_tf.config.files import nearest
from smp_tf.config.values import kind_of
from smp_tf.errors import OfflinePlanError
from smp_tf.keras import adapter
from smp_tf.keras.optimizer_trials import slots_of
from smp_tf.keras.protocols import UnknownNameError
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
    # Keras makes some of them from their names, but not all.
    kinds |= adapter.optimizers().kinds()
    try:
        made = kinds[name.lower()]() if name.lower() in kinds else adapter.optimizers().made(name)
    except UnknownNameError:
        missing = f"tf.keras.optimizers has no optimizer of the name {name!r}.{nearest(name, kinds)}"
        raise OfflinePlanError(missing) from None
    except Exception as error:
        raise OfflinePlanError(f"Optimizer {name!r} cannot be made of its name alone: {words_of(error)}.") from error
    if not adapter.slots().is_optimizer(made):
        raise OfflinePlanError(f"{name!r} must be an optimizer. It is {kind_of(made)}.")
    return made

"""Replicas apply the same averages, so they must do it alike: at its first use they compare an optimizer's arguments.

    replica 0: SGD(0.1)     replica 1: SGD(0.2)     ─▶ an error before the first weight changes

Weights do not tell where replicas share the optimizer's slots: each follows the optimizer of the replica that updates
it, and the gather makes it equal on all.
"""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.job import exchange, runtime
from smp_tf.partition.mesh import CommGroup
from smp_tf.sharding import layouts

#: What an optimizer says of itself that changes no weight: names are counted up in each process, and who compiles
#: depends on the host's devices.
_LEFT_OUT = ("name", "jit_compile")
_NAME = "the optimizer with which they apply gradients"
_HINT = (
    "Replicas apply the same averages, so they must do it alike. Make the optimizer with the same arguments on every "
    "replica: nothing in them may depend on the rank, or on a file of one host. check_replicas=False switches this "
    "check off."
)

#: The start of smp_tf in which replicas have compared an optimizer.
_compared: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def require_equal_optimizers(optimizer: Any) -> None:
    """Raises where replicas apply gradients of distributed models with other optimizers than each other.

    Once for an optimizer, at its first use since `smp.init`, to which all replicas come; to later traces of a function
    they may not come together.

    Args:
        optimizer: any Keras optimizer. Of one that does not say its arguments, the class is compared.

    Raises:
        RankMismatchError: they do; the message names the argument.
    """
    running = runtime.current_or_none()
    if running is None or running.topology.replicas == 1 or not running.config.check_replicas:
        return
    if _compared.get(optimizer) == runtime.starts():
        return
    # The older optimizers make their count of steps when they are asked for it.
    with tf.init_scope(), tf_internals.kept_trace():
        exchange.agree(_NAME, _told(optimizer), CommGroup.RDP_GROUP, hint=_HINT)
    _compared[optimizer] = runtime.starts()


def _told(optimizer: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"class": _name_of(type(optimizer))}
    try:
        config = optimizer.get_config()
    except Exception:
        # Whatever a class of the script's raises there; it does so on all replicas.
        return told
    # Otherwise weights would tell, and `fit` gives all replicas the state of one.
    counted = {"iterations": int(optimizer.iterations)} if layouts.are_shared() else {}
    return {**told, **plain(config), **counted}


def plain(value: Any) -> Any:
    """Returns something as it can be compared between processes: as JSON holds it, numbers by their value.

    Args:
        value: arguments of an optimizer, or one of them.

    Returns:
        The same, without what changes no weight; of an object that is neither number, text nor container, its class.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Number | np.generic | np.ndarray | tf.Tensor | tf.Variable):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items() if key not in _LEFT_OUT}
    if isinstance(value, Sequence):
        return [plain(one) for one in value]
    if isinstance(value, Set):
        return sorted(str(plain(one)) for one in value)
    return _name_of(value if isinstance(value, type) or callable(value) else type(value))


def _number(value: Any) -> Any:
    """Returns a number, or an array of them, as floats: nobody minds whether 1 or 1.0 was given."""
    array = np.asarray(value)
    if array.ndim:
        return [_number(one) for one in array]
    if array.dtype.kind == "b":
        return bool(array)
    if array.dtype.kind not in "iuf":
        return str(array)
    # As its own type shows it: 0.1 of four bytes, not 0.10000000149.
    found = float(str(array.item() if array.dtype.kind != "f" else array[()]))
    return found if found == found else "nan"


def _name_of(named: Any) -> str:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"

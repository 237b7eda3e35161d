"""Compares an optimizer's arguments on all replicas at its first use, since they must apply averages alike.

    replica 0: SGD(0.1)     replica 1: SGD(0.2)     ─▶ an error before the first weight changes

Weights would not show a difference where replicas share the optimizer's slots. Each weight follows the optimizer of the
replica that updates it, and the gather makes it equal on all.
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

#: Arguments of an optimizer that change no weight. Names are counted in each process, and whether it compiles depends
#: on the host's devices.
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
    """Raises an error where replicas apply gradients of distributed models with different optimizers.

    It compares an optimizer once, at its first use since `smp.init`, which all replicas come to. They may not come
    together to later traces of a function.

    Args:
        optimizer: any Keras optimizer. If it does not say its arguments, the class is compared.

    Raises:
        RankMismatchError: the optimizers differ. The message names the argument.
    """
    running = runtime.current_or_none()
    if running is None or running.topology.replicas == 1 or not running.config.check_replicas:
        return
    if _compared.get(optimizer) == runtime.starts():
        return
    # Older optimizers make their count of steps when they are asked for it.
    with tf.init_scope(), tf_internals.kept_trace():
        exchange.agree(_NAME, _told(optimizer), CommGroup.RDP_GROUP, hint=_HINT)
    _compared[optimizer] = runtime.starts()


def _told(optimizer: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"class": _name_of(type(optimizer))}
    try:
        config = optimizer.get_config()
    except Exception:
        # A class of the script's may raise anything here. It does so on all replicas.
        return told
    # Otherwise weights would show it, and `fit` gives all replicas the state of one.
    counted = {"iterations": int(optimizer.iterations)} if layouts.are_shared() else {}
    return {**told, **plain(config), **counted}


def plain(value: Any) -> Any:
    """Returns a value in a form that processes can compare: as JSON holds it, with numbers by their values.

    Args:
        value: arguments of an optimizer, or one of them.

    Returns:
        The same, without arguments that change no weight. An object that is no number, text or container is replaced by
        its class.
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
    """Returns a number, or an array of numbers, as floats, so that 1 equals 1.0."""
    array = np.asarray(value)
    if array.ndim:
        return [_number(one) for one in array]
    if array.dtype.kind == "b":
        return bool(array)
    if array.dtype.kind not in "iuf":
        return str(array)
    # As its own type shows it, so that 0.1 of four bytes is not 0.10000000149.
    found = float(str(array.item() if array.dtype.kind != "f" else array[()]))
    return found if found == found else "nan"


def _name_of(named: Any) -> str:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"

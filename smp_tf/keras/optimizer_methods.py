"""The methods that callers of an optimizer get: Keras's or the script's, or ours in place of either.

Our methods replace those in Keras's classes. A method of the script's is replaced where it is looked up, on the
optimizer:

class Half(SGD): def apply_gradients ...                 before or after the first distributed model
class Half(Mixin, SGD)                                   Mixin is no optimizer
optimizer.apply_gradients = function                     for one optimizer alone
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smp_tf.keras import adapter

#: A function that makes our method from the one that is there. Both take the optimizer first.
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

#: The attributes of an optimizer in which `smp.DistributedOptimizer` keeps its `apply_gradients` and the one before.
OWN_APPLY, REPLACED_APPLY = "_smp_tf_apply", "_smp_tf_replaced_apply"

#: Our functions, and whether they replace Keras's own.
_ours: weakref.WeakKeyDictionary[Callable[..., Any], bool] = weakref.WeakKeyDictionary()


def note(ours: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Remembers that a function of ours replaces another one."""
    _ours[ours] = is_of_keras(original)


def is_ours(method: Any) -> bool:
    """Returns whether a method, bound or not, is one of ours."""
    function = getattr(method, "__func__", method)
    return isinstance(function, types.FunctionType) and function in _ours


def is_of_keras(method: Any) -> bool:
    """Returns whether a method is Keras's own, even where ours replaces it.

    One of the script's may, for example, clip by the norm of what it is given, or send something.
    """
    function = getattr(method, "__func__", method)
    if is_ours(function):
        return _ours[function]
    # `__module__` does not tell, since `functools.wraps` copies it, so that a wrapper of the script's would pass for
    # Keras's.
    module = str(getattr(function, "__globals__", {}).get("__name__", ""))
    return module.startswith("tensorflow.") or adapter.optimizers().is_own_module(module)


def has_own_apply(optimizer: Any) -> bool:
    """Returns whether code of the script's is given the gradients that an optimizer applies, or one that it wraps."""
    held = vars(optimizer)
    apply = held.get("apply_gradients", type(optimizer).apply_gradients)
    if not is_of_keras(held[REPLACED_APPLY] if apply is held.get(OWN_APPLY) else apply):
        return True
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner is not None and has_own_apply(inner)


def met(optimizer: Any, name: str, found: Any, wrapper: Wrapper) -> Any:
    """Returns a method that was looked up on an optimizer, or ours in its place where the script defines it.

    Args:
        optimizer: the optimizer.
        name: name of the method.
        found: the method, bound.
        wrapper: makes ours.
    """
    if not callable(found) or is_ours(found):
        return found
    called = _as_its_caller(found) if name in ("apply_gradients", REPLACED_APPLY) else found

    def unbound(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    # AutoGraph turns a method of the script's into a function of TensorFlow's.
    note(unbound, found)
    ours = wrapper(unbound)
    # The name of its module is not copied, since AutoGraph would take it for the script's.
    for copied in ("__name__", "__doc__"):
        setattr(ours, copied, getattr(found, copied, None))
    note(ours, found)
    return types.MethodType(ours, optimizer)


def _as_its_caller(found: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method in the form that AutoGraph gives it for a converted caller."""
    context = tf.__internal__.autograph.control_status_ctx()
    if context.status.name != "ENABLED":
        return found
    converted: Callable[..., Any] = tf.__internal__.autograph.tf_convert(found, context)
    return converted

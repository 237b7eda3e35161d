"""Knows which optimizers have reported slots on this rank, and how large these are."""

from __future__ import annotations

import weakref
from typing import Any

from smp_tf.keras import adapter

#: Optimizers that have reported on this rank, and whether they were built for variables here.
_reported: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def report(optimizer: Any, built: bool) -> bool:
    """Notes that an optimizer has made its slots on this rank, or that it has none to make here.

    Args:
        optimizer: any Keras optimizer.
        built: whether it was built for variables of this rank.

    Returns:
        Whether this is new.
    """
    inner = adapter.slots().innermost(optimizer)
    known = _reported.get(inner)
    _reported[inner] = built or bool(known)
    return known is None or (built and not known)


def forget(optimizer: Any) -> None:
    """Forgets the report of an optimizer that was only a copy made to find out something."""
    _reported.pop(optimizer, None)


def in_use() -> list[Any]:
    """Returns the optimizers that were built for variables of this rank."""
    return [optimizer for optimizer, built in _reported.items() if built]


def is_ready(optimizer: Any) -> bool:
    """Returns whether an optimizer has made its slots, or is known to need none on this rank."""
    return adapter.slots().innermost(optimizer) in _reported or has_slots(optimizer)


def has_slots(optimizer: Any) -> bool:
    """Returns whether an optimizer has been built for variables on this rank."""
    found = adapter.slots().has_slots(optimizer)
    return _reported.get(adapter.slots().innermost(optimizer), False) if found is None else found


def has_whole_slots(optimizer: Any, variable: Any) -> bool:
    """Returns whether an optimizer has a slot of a variable with the variable's shape."""
    return any(slot.shape == variable.shape for _, _, slot in adapter.slots().slots(optimizer, [variable]))


def slot_bytes_here() -> int:
    """Returns the bytes of slots and errors that optimizers of variables of this rank have here."""
    found = 0
    for optimizer in in_use():
        kept = adapter.slots().variables_of(optimizer)
        found += sum(v.shape.num_elements() * v.dtype.size for v in kept if v.shape.rank)
        found += optimizer.error_feedback.nbytes if hasattr(optimizer, "error_feedback") else 0
    return found

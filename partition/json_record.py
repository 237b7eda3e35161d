"""A data class read from JSON: every field there, of its type, and no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import UnionType
from typing import Any, get_type_hints

from smp_tf.partition.errors import PlacementError


def record_from(kind: type, fields: Any, what: str) -> Any:
    """An instance of a data class from JSON fields, all of them checked.

    Args:
        kind: the data class; its fields are ints, floats, strings, data classes, tuples and dicts of such, or None.
        fields: what `json.loads` gave.
        what: what it is, for messages.

    Returns:
        The instance.

    Raises:
        PlacementError: a field is missing, unknown or mistyped.
    """
    if not isinstance(fields, dict):
        raise PlacementError(f"{what.capitalize()} must be an object. Received: {fields!r}.")
    hints = get_type_hints(kind)
    expected = {field.name for field in dataclasses.fields(kind)}
    if fields.keys() != expected:
        wrong = sorted(expected.symmetric_difference(fields))
        raise PlacementError(f"{what.capitalize()} must have the fields {sorted(expected)}. Wrong: {wrong}.")
    return kind(**{name: _value(hints[name], fields[name], f"{name} of {what}") for name in expected})


def _value(hint: Any, value: Any, what: str) -> Any:
    kind: Any = getattr(hint, "__origin__", hint)
    parts: Sequence[Any] = getattr(hint, "__args__", ())
    if isinstance(hint, UnionType):
        some, *_ = (part for part in parts if part is not type(None))
        return None if value is None and type(None) in parts else _value(some, value, what)
    if kind is tuple and isinstance(value, list):
        return tuple(_value(parts[0], v, f"an entry of {what}") for v in value)
    if kind is dict and isinstance(value, dict):
        return {k: _value(parts[1], v, f"{k!r} in {what}") for k, v in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return record_from(kind, value, f"an entry of {what}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise PlacementError(f"{what} must be of type {getattr(kind, '__name__', kind)}. Received: {value!r}.")
    return value

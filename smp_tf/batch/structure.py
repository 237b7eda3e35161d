"""Structures of arguments: which ones may hold tensors, how tensors' places are kept, and when two are alike."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.batch.sets import Reference, SetOf


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a structure."""

    index: int


@dataclass(frozen=True)
class Template:
    """Stands for an object that holds tensors, by its class and, by name, all its attributes with slots in them."""

    kind: type
    attributes: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(f'{name}={value!r}' for name, value in self.attributes.items())})"

    def filled(self, convert: Callable[[Any], Any]) -> Any:
        """Returns an object of the class with its attributes converted. Its `__init__` does not run again."""
        made: Any = object.__new__(self.kind)
        for name, value in self.attributes.items():
            # This bypasses a frozen dataclass's own __setattr__.
            object.__setattr__(made, name, convert(value))
        return made


def is_record(value: Any) -> bool:
    """Returns whether a value is an instance of a dataclass, or of a class that attrs made."""
    if isinstance(value, (type, tf.Module, tf.__internal__.CompositeTensor, Mapping, list, tuple)):
        return False
    return dataclasses.is_dataclass(value) or hasattr(type(value), "__attrs_attrs__")


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns all attributes of an object by name, also those in slots."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> Sequence[str]:
    names = kind.__dict__.get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def with_attributes(value: Any, convert: Callable[[str, Any], Any]) -> Any:
    """Returns an object's template with its attributes converted; the object itself where none changes.

    Args:
        value: any object.
        convert: takes how an attribute is reached, such as ".rate", and the attribute.
    """
    before = attributes_of(value)
    after = {name: convert(f".{name}", attribute) for name, attribute in before.items()}
    return value if all(after[name] is before[name] for name in before) else Template(type(value), after)


def map_children(value: Any, convert: Callable[[str, Any], Any]) -> Any:
    """Returns a mapping or sequence with its items converted; itself where none changes, or for anything else.

    Args:
        value: any object.
        convert: takes how an item is reached, such as "['x']", and the item.
    """
    if isinstance(value, Mapping):
        kind: Any = type(value)
        converted = {k: convert(f"[{k!r}]", v) for k, v in value.items()}
        if all(converted[k] is v for k, v in value.items()):
            return value
        return kind(value.default_factory, converted) if isinstance(value, defaultdict) else kind(converted)
    if isinstance(value, (list, tuple)):
        names = [f".{f}" for f in value._fields] if hasattr(value, "_fields") else [f"[{i}]" for i in range(len(value))]
        items = [convert(name, item) for name, item in zip(names, value, strict=True)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        kind = type(value)
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return value


def children(value: Any) -> list[tuple[str, Any]]:
    """Returns the items of a mapping or sequence, each with how it is reached; none for anything else."""
    found: list[tuple[str, Any]] = []

    def note(key: str, child: Any) -> Any:
        found.append((key, child))
        return child

    map_children(value, note)
    return found


def fill(structure: Any, tensors: Sequence[Any]) -> Any:
    """Returns a structure with tensors in place of its slots, and objects in place of their templates."""
    if isinstance(structure, Slot):
        return tensors[structure.index]
    if isinstance(structure, (Template, SetOf)):
        return structure.filled(lambda value: fill(value, tensors))
    if isinstance(structure, Reference):
        return fill(structure.slot, tensors).ref()
    return map_children(structure, lambda _, child: fill(child, tensors))


def key_of(value: Any) -> Any:
    """Returns a key that is equal exactly for values with which a function is traced alike."""
    if isinstance(value, tf.Variable):
        return value.ref()
    if isinstance(value, Template):
        return value.kind, tuple((name, key_of(attribute)) for name, attribute in value.attributes.items())
    if isinstance(value, SetOf):
        return value.kind, tuple(map(key_of, value.items))
    if isinstance(value, (Mapping, list, tuple)):
        return type(value), tuple((key, key_of(child)) for key, child in children(value))
    try:
        hash(value)
    except TypeError:
        return type(value), repr(value)
    return type(value), value

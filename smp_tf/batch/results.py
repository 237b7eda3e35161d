"""What a step returns: made ready for TensorFlow, put together again, and searched for named outputs.

TensorFlow knows only lists, dictionaries and named tuples. While it is inside TensorFlow, an instance of a dataclass,
or of a class that attrs made, is a named tuple of its fields.
"""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from operator import itemgetter
from typing import Any

import tensorflow as tf

from smp_tf.batch.sets import is_reference
from smp_tf.batch.sliced_objects import holds_tensors
from smp_tf.batch.structure import Template, attributes_of, is_record, map_children
from smp_tf.errors import StepError
from smp_tf.job_state import JobState
from smp_tf.partition.trace.lower import OutputSlot


class _StandIns:
    """The named tuple that stands for a class, by the class and the names of its attributes; and the class of each."""

    def __init__(self) -> None:
        self.by_class: dict[tuple[type, tuple[str, ...]], type] = {}
        self.classes: dict[type, tuple[type, tuple[str, ...]]] = {}


_stand_ins = JobState(_StandIns)


def pack(value: Any, step: str) -> Any:
    """Returns what a step returned, with named tuples in place of records.

    Args:
        value: what the step function returned.
        step: name of the step, for messages.

    Raises:
        StepError: an object that TensorFlow cannot look into holds tensors.
    """
    if is_record(value):
        attributes = attributes_of(value)
        stand_in = _stand_in(type(value), tuple(attributes))
        return stand_in(*(pack(attribute, step) for attribute in attributes.values()))
    if is_reference(value) or (isinstance(value, Set) and any(map(is_reference, value))):
        raise StepError(
            f"Step {step!r} returns a reference to a tensor, or a set of them, which mean nothing outside of it. "
            f"Return the tensors in a dictionary, list, tuple, named tuple or dataclass."
        )
    if holds_tensors(value):
        raise StepError(
            f"Step {step!r} returns a {type(value).__name__} that holds tensors. They belong to one microbatch while "
            f"it is traced, and mean nothing outside. Return them in a dictionary, list, tuple, named tuple or "
            f"dataclass."
        )
    return map_children(value, lambda _, child: pack(child, step))


def unpack(value: Any) -> Any:
    """Returns the same structure with the records back in place of their named tuples."""
    if type(value) in (classes := _stand_ins().classes):
        kind, names = classes[type(value)]
        return Template(kind, dict(zip(names, value, strict=True))).filled(unpack)
    return map_children(value, lambda _, child: unpack(child))


#: A function that makes a part of a step's result from the values in its places.
_Maker = Callable[[Sequence[Any]], Any]


class ResultStructure:
    """What a step returns, with a place for each tensor. It is analysed once, and made anew for every batch.

    Args:
        results: what the step returned when it was traced, ready for TensorFlow, with an `OutputSlot` for each tensor.
    """

    def __init__(self, results: Any) -> None:
        #: The slots, in the order of the places.
        self.slots: list[OutputSlot] = []
        self._make = self._maker(results)

    def filled(self, values: Sequence[Any]) -> Any:
        """Returns the structure, new throughout, with a value in each place.

        Args:
            values: one value for each of `slots`.
        """
        return self._make(values)

    def _maker(self, part: Any) -> _Maker:
        if isinstance(part, OutputSlot):
            self.slots.append(part)
            return itemgetter(len(self.slots) - 1)
        if type(part) in (classes := _stand_ins().classes):
            record, names = classes[type(part)]
            items = {name: self._maker(item) for name, item in zip(names, part, strict=True)}
            return lambda values: Template(record, items).filled(lambda make: make(values))
        if isinstance(part, Mapping):
            items = {key: self._maker(item) for key, item in part.items()}
            return lambda values: _mapping_like(part, [(key, make(values)) for key, make in items.items()])
        if isinstance(part, (list, tuple)):
            kind: Any = type(part)
            makers = [self._maker(item) for item in part]
            if hasattr(part, "_fields"):
                return lambda values: kind(*[make(values) for make in makers])
            return lambda values: kind([make(values) for make in makers])
        return lambda values: part


def _mapping_like(like: Mapping[Any, Any], items: Sequence[tuple[Any, Any]]) -> Any:
    """Returns a mapping of the same kind with other items."""
    kind: Any = type(like)
    if not isinstance(like, MutableMapping):
        return kind(items)
    made = defaultdict(like.default_factory) if isinstance(like, defaultdict) else kind()
    made.update(items)
    return made


def _stand_in(kind: type, names: tuple[str, ...]) -> Any:
    known = _stand_ins()
    if (kind, names) not in known.by_class:
        # Names that a named tuple cannot have become positions there. Our names are kept next to it.
        made: Any = namedtuple(kind.__name__, names, rename=True)  # type: ignore[misc]
        known.by_class[kind, names] = made
        known.classes[made] = kind, names
    return known.by_class[kind, names]


def local_outputs_of(results: Any, names: Sequence[str]) -> frozenset[int]:
    """Returns the positions of the outputs that `local_outputs` names, by key or position in the structure."""
    if not names:
        return frozenset()
    found: set[int] = set()
    for name in names:
        part = _part_of(results, name)
        found.update(i for slot in tf.nest.flatten(part) if isinstance(slot, OutputSlot) for i in slot.outputs)
    return frozenset(found)


def composites_of(results: Any) -> list[tuple[int, ...]]:
    """Returns the positions of the outputs that are parts of one composite tensor."""
    slots = (slot for slot in tf.nest.flatten(results) if isinstance(slot, OutputSlot))
    return [slot.outputs for slot in slots if slot.spec is not None]


def _part_of(results: Any, name: str) -> Any:
    if isinstance(results, Mapping) and name in results:
        return results[name]
    if isinstance(results, tuple) and hasattr(results, "_fields") and name in results._fields:
        return getattr(results, name)
    if isinstance(results, (list, tuple)) and str(name).isdigit() and int(name) < len(results):
        return results[int(name)]
    raise StepError(
        f"local_outputs names {name!r}, which is not in what the step returns. Use a key of the returned mapping, a "
        f"field of the returned named tuple, or a position in the returned sequence."
    )

"""Makes what a step returns ready for TensorFlow, which knows lists, dictionaries and named tuples only.

While it is inside TensorFlow, an instance of a dataclass, or of a class that attrs made, is a named tuple of its
fields.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Set
from typing import Any

from smp_tf.batch.sets import is_reference
from smp_tf.batch.sliced_objects import holds_tensors
from smp_tf.batch.structure import Template, attributes_of, is_record, map_children
from smp_tf.errors import StepError
from smp_tf.job_state import JobState


class _StandIns:
    """The named tuple that stands for a class, by the class and the names of its attributes; and the way back."""

    def __init__(self) -> None:
        self.by_class: dict[tuple[type, tuple[str, ...]], type] = {}
        self.classes: dict[type, tuple[type, tuple[str, ...]]] = {}


_stand_ins = JobState(_StandIns)


def pack(value: Any, step: str) -> Any:
    """Returns what a step returned, with named tuples in place of records.

    Args:
        value: what the step function returned.
        step: its name, for messages.

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


def _stand_in(kind: type, names: tuple[str, ...]) -> Any:
    known = _stand_ins()
    if (kind, names) not in known.by_class:
        # Names that a named tuple cannot have become positions there; ours are kept next to it.
        made: Any = namedtuple(kind.__name__, names, rename=True)  # type: ignore[misc]
        known.by_class[kind, names] = made
        known.classes[made] = kind, names
    return known.by_class[kind, names]

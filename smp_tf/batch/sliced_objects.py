"""Handles objects of the script's own that a step cuts by their method `smp_slice(num_mb, mb, axis)`.

A traced function takes tensors, so such an object is passed as a composite tensor. That is the object without its
tensors (the template), and the tensors. It is put together again wherever its method, or the step, needs it:

    Pair(x, y, name="a")  ──▶  template Pair(Slot 0, Slot 1, name="a") + tensors (x, y)
                          ──▶  in the caller's graph, for microbatch m: Pair(x, y, "a").smp_slice(M, m, 0)
                          ──▶  template of the slice + its tensors: what the step of one microbatch is given
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.batch.structure import Slot, children, fill, is_record, key_of, map_children, with_attributes
from smp_tf.errors import StepError
from smp_tf.job_state import JobState

#: Objects that may hold tensors but are passed as they are. The step uses them, and none of their tensors is cut.
_KNOWN = (tf.Module, tf.Variable, type)

#: A number for each template, since TensorFlow compares types by simple values.
_numbers: JobState[dict[Any, int]] = JobState(dict)


class ObjectTensors(tf.__internal__.CompositeTensor):
    """An object that is taken apart into its template and its tensors.

    Args:
        template: the object with a `Slot` in place of each tensor.
        tensors: the tensors. Composite ones are whole.
    """

    def __init__(self, template: Any, tensors: Sequence[Any]) -> None:
        self.template = template
        self.tensors = tuple(tensors)

    @property
    def _type_spec(self) -> ObjectSpec:
        return ObjectSpec(self.template, tuple(map(tf.type_spec_from_value, self.tensors)))

    def value(self) -> Any:
        """Returns the object, with the tensors in it."""
        return fill(self.template, self.tensors)


class ObjectSpec(tf.TypeSpec):
    """The type of an object that is taken apart: its template, and the types of its tensors."""

    def __init__(self, template: Any, specs: Sequence[tf.TypeSpec]) -> None:
        self.template = template
        self.specs = tuple(_without_name(spec) for spec in specs)
        numbers = _numbers()
        self._number = numbers.setdefault(key_of(template), len(numbers))

    @property
    def value_type(self) -> type[ObjectTensors]:
        """Returns the class whose instances have such a type."""
        return ObjectTensors

    @property
    def _component_specs(self) -> tuple[tf.TypeSpec, ...]:
        return self.specs

    def _to_components(self, value: ObjectTensors) -> tuple[Any, ...]:
        return value.tensors

    def _from_components(self, components: Sequence[Any]) -> ObjectTensors:
        return ObjectTensors(self.template, components)

    def _serialize(self) -> tuple[Any, ...]:
        return self._number, self.specs

    def common(self, other: ObjectSpec) -> ObjectSpec | None:
        """Returns the common type, without the lengths in which the two differ; None if they differ otherwise."""
        if self._number != other._number or len(self.specs) != len(other.specs):
            return None
        specs = [a.most_specific_common_supertype([b]) for a, b in zip(self.specs, other.specs, strict=True)]
        return None if None in specs else ObjectSpec(self.template, specs)


def _without_name(spec: tf.TypeSpec) -> tf.TypeSpec:
    return tf.TensorSpec(spec.shape, spec.dtype) if type(spec) is tf.TensorSpec else spec


def is_sliced_object(value: Any) -> bool:
    """Returns whether an object itself says how it is cut into microbatches."""
    return not isinstance(value, type) and callable(getattr(value, "smp_slice", None))


def holds_tensors(value: Any) -> bool:
    """Returns whether an object of no known structure has tensors among its attributes.

    A mapping or sequence may also have its items as attributes. These are found by going through the items.
    """
    if isinstance(value, (*_KNOWN, tf.__internal__.CompositeTensor)) or is_record(value) or tf.is_tensor(value):
        return False
    attributes = [a for a in getattr(value, "__dict__", {}).values() if tf.is_tensor(a)]
    items = {id(item) for _, item in children(value)} if attributes else set()
    return any(id(attribute) not in items for attribute in attributes)


def take_apart(value: Any, name: str) -> ObjectTensors:
    """Returns an object, or the result of its `smp_slice`, as a composite tensor.

    Args:
        value: an object, a tensor, or a structure of them.
        name: words for the object, for messages.
    """
    tensors: list[Any] = []

    def place(path: str, part: Any) -> Any:
        if isinstance(part, (np.ndarray, np.generic)):
            part = tf.convert_to_tensor(part)
        composite = isinstance(part, tf.__internal__.CompositeTensor) and not isinstance(part, tf.Variable)
        if isinstance(part, tf.Tensor) or composite:
            tensors.append(part)
            return Slot(len(tensors) - 1)
        if isinstance(part, _KNOWN):
            return part
        if is_sliced_object(part) or is_record(part) or holds_tensors(part):
            return with_attributes(part, lambda key, child: place(f"{path}{key}", child))
        return map_children(part, lambda key, child: place(f"{path}{key}", child))

    return ObjectTensors(place(name, value), tensors)


def slice_of(value: ObjectTensors, microbatches: int, microbatch: int, axis: int, name: str) -> ObjectTensors:
    """Returns one microbatch of an object.

    Args:
        value: the whole object.
        microbatches: number of microbatches that it is cut into.
        microbatch: number of the microbatch.
        axis: the axis that the step asks for.
        name: the argument's name, for messages.
    """
    return take_apart(value.value().smp_slice(microbatches, microbatch, axis), f"{name}.smp_slice(...)")


def slice_spec(spec: ObjectSpec, microbatches: int, axis: int, name: str) -> ObjectSpec:
    """Returns the type of every microbatch of an object.

    Args:
        spec: type of the whole object.
        microbatches: number of microbatches that it is cut into.
        axis: the axis that the step asks for.
        name: the argument's name, for messages.

    Returns:
        The type, without the lengths in which microbatches differ.

    Raises:
        StepError: two microbatches do not have the same structure and types.
    """
    found: list[ObjectSpec] = []

    def cut(value: ObjectTensors) -> list[Any]:
        pieces = [slice_of(value, microbatches, number, axis, name) for number in range(microbatches)]
        found.extend(piece._type_spec for piece in pieces)
        return [piece.tensors for piece in pieces]

    tf.function(cut, autograph=False).get_concrete_function(spec)
    common = found[0]
    for number, other in enumerate(found):
        both = common.common(other)
        if both is None:
            raise StepError(
                f"smp_slice of step argument {name!r} must give the same structure for every microbatch, since all of "
                f"them run one program. Microbatch 0 is {spec_in_words(found[0])}; microbatch {number} is "
                f"{spec_in_words(other)}."
            )
        common = both
    return common


def spec_in_words(spec: Any) -> str:
    """Returns words for a type, such as "float32(8, 3)"."""
    if isinstance(spec, ObjectSpec):
        return f"{spec.template!r} of {', '.join(map(spec_in_words, spec.specs)) or 'no tensors'}"
    return f"{spec.dtype.name}{spec.shape}"


def kind_in_words(spec: Any) -> str:
    """Returns words for a type without sizes ("float32 of 2 axes"), which replicas with their own batches share."""
    if isinstance(spec, ObjectSpec):
        return f"{type(spec.template).__name__} of {', '.join(map(kind_in_words, spec.specs)) or 'no tensors'}"
    return f"{spec.dtype.name} of {'some' if spec.shape.rank is None else spec.shape.rank} axes"

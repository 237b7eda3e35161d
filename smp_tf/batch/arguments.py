"""Sorts the arguments of a step into tensors to cut into microbatches, and everything else."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.batch.sets import Reference, SetOf, in_order, is_reference
from smp_tf.batch.sliced_objects import holds_tensors, is_sliced_object, take_apart
from smp_tf.batch.structure import Slot, attributes_of, children, is_record, key_of, map_children, with_attributes
from smp_tf.errors import StepError

#: Structures that have only their items. None of them is cut by a method of its own, or hides tensors.
_PLAIN = (dict, list, tuple)


@dataclass(frozen=True)
class Arguments:
    """A call's arguments, sorted.

    Args:
        structure: what was passed, by parameter, with each tensor replaced by a `Slot`.
        tensors: the tensors. Composite ones are whole; objects with `smp_slice` are `ObjectTensors`.
        names: full name of each tensor, for messages.
        roots: name of the parameter each belongs to.
        specs: the type that each is traced with: its own, or that of `input_signature`.
    """

    structure: Mapping[str, Any]
    tensors: tuple[Any, ...]
    names: tuple[str, ...]
    roots: tuple[str, ...]
    specs: tuple[tf.TypeSpec, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Returns what a program is made for: the types of the tensors, and the values of all other arguments."""
        return key_of(self.structure), *self.specs

    def with_own_types(self) -> Arguments:
        """Returns the same arguments, to be traced with the tensors' own types and not those of `input_signature`."""
        return dataclasses.replace(self, specs=tuple(map(type_of, self.tensors)))


def type_of(tensor: Any) -> tf.TypeSpec:
    """Returns the type of a tensor, without its name."""
    if isinstance(tensor, tf.Tensor):
        return tf.TensorSpec(tensor.shape, tensor.dtype)
    spec = tf.type_spec_from_value(tensor)
    return tf.TensorSpec(spec.shape, spec.dtype) if isinstance(spec, tf.TensorSpec) else spec


def sort_arguments(bound: inspect.BoundArguments, signature: Sequence[Any] | None) -> Arguments:
    """Finds the tensors in the arguments of a call.

    Args:
        bound: the call's arguments.
        signature: the types to convert positional arguments to, as `input_signature` gives them, or None.

    Returns:
        The sorted arguments. NumPy arrays count as tensors.

    Raises:
        StepError: an argument does not have the structure that the signature says.
    """
    sorter = _Sorter()
    specs = list(signature or ())
    structure = {}
    for position, (name, parameter) in enumerate(bound.signature.parameters.items()):
        if name not in bound.arguments:
            continue
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = [*specs[position:], *[None] * len(value)]
            structure[name] = tuple(
                sorter.place(name, f"{name}[{number}]", item, spec)
                for number, (item, spec) in enumerate(zip(value, rest, strict=False))
            )
        else:
            structure[name] = sorter.place(name, name, value, specs[position] if position < len(specs) else None)
    return Arguments(structure, tuple(sorter.tensors), tuple(sorter.names), tuple(sorter.roots), tuple(sorter.specs))


class _Sorter:
    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.names: list[str] = []
        self.roots: list[str] = []
        self.specs: list[tf.TypeSpec] = []

    def _keep(self, root: str, path: str, tensor: Any, spec: tf.TypeSpec | None = None) -> Slot:
        self.tensors.append(tensor)
        self.names.append(path)
        self.roots.append(root)
        self.specs.append(type_of(tensor) if spec is None else spec)
        return Slot(len(self.tensors) - 1)

    def place(self, root: str, path: str, value: Any, spec: Any = None) -> Any:
        """Returns a value with slots in place of its tensors. They are cast to the types of a similar structure."""
        if isinstance(spec, tf.TensorSpec) and value is not None:
            return self._keep_as(root, path, tf.cast(tf.convert_to_tensor(value), spec.dtype), spec)
        if isinstance(spec, tf.TypeSpec) and value is not None:
            return self._keep_as(root, path, value, spec)
        if isinstance(value, tf.Tensor):
            return self._keep(root, path, value)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._keep(root, path, tf.convert_to_tensor(value))
        if type(value) in _PLAIN:
            return self._place_items(root, path, value, spec)
        if isinstance(value, tf.__internal__.CompositeTensor) and not isinstance(value, tf.Variable):
            return self._keep(root, path, value)
        if is_sliced_object(value):
            return self._keep(root, path, take_apart(value, path))
        if is_record(value):
            typed = attributes_of(spec) if type(spec) is type(value) else {}
            return with_attributes(
                value, lambda key, child: self.place(root, f"{path}{key}", child, typed.get(key[1:]))
            )
        if is_reference(value):
            return Reference(self.place(root, f"{path}.deref()", value.deref()))
        if isinstance(value, Set):
            return self._place_set(root, path, value)
        self._refuse_hidden_tensors(path, value)
        return self._place_items(root, path, value, spec)

    def _place_items(self, root: str, path: str, value: Any, spec: Any) -> Any:
        specs = dict(children(spec)) if spec is not None else {}
        if specs and specs.keys() != dict(children(value)).keys():
            raise StepError(
                f"Step argument {path!r} does not have the structure that input_signature gives it. Received: "
                f"{value!r} where the signature has {spec!r}"
            )
        return map_children(value, lambda key, child: self.place(root, f"{path}{key}", child, specs.get(key)))

    def _keep_as(self, root: str, path: str, value: Any, spec: tf.TypeSpec) -> Slot:
        """Keeps a tensor to be traced with the type that the signature gives it."""
        own = type_of(value)
        wanted = tf.TensorSpec(spec.shape, spec.dtype) if isinstance(spec, tf.TensorSpec) else spec
        if not wanted.is_compatible_with(own):
            raise StepError(
                f"Step argument {path!r} does not fit its type in input_signature, {spec!r}. Received: {own!r}"
            )
        return self._keep(root, path, value, wanted)

    def _place_set(self, root: str, path: str, value: Set[Any]) -> Any:
        def described(item: Any) -> tuple[str, Sequence[tf.TypeSpec]]:
            apart = _Sorter()
            structure = apart.place(root, path, item)
            is_told = bool(apart.specs) or isinstance(item, (str, bytes, int, float))
            return repr(structure) if is_told else "", apart.specs

        items = in_order(value, path, described)
        if items is None:
            return value
        return SetOf(type(value), tuple(self.place(root, f"{path}[{n}]", item) for n, item in enumerate(items)))

    def _refuse_hidden_tensors(self, path: str, value: Any) -> None:
        if holds_tensors(value):
            raise StepError(
                f"Step argument {path!r} is a {type(value).__name__} that holds tensors, which a step cannot find in "
                f"it to cut them. Pass the tensors themselves, or a dictionary, list, named tuple or dataclass of "
                f"them; or give the class a method smp_slice(num_mb, mb, axis) that returns microbatch mb of num_mb."
            )

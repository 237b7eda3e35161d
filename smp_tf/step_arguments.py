"""The arguments of a step, sorted: tensors to cut into microbatches, and everything else as it is."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.errors import StepError


@dataclass(frozen=True)
class Slot:
    """Place of a tensor argument in the structure of a call's arguments."""

    index: int


@dataclass(frozen=True)
class Arguments:
    """A call's arguments, sorted.

    Args:
        structure: by parameter: what was passed, each tensor replaced by a `Slot`.
        tensors: the tensors, composite ones whole.
        names: full name of each tensor, for messages.
        roots: name of the parameter each belongs to.
    """

    structure: Mapping[str, Any]
    tensors: tuple[Any, ...]
    names: tuple[str, ...]
    roots: tuple[str, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a program is made for: the types of the tensors, and the values of all other arguments."""
        return _key(self.structure), *(tf.type_spec_from_value(t) for t in self.tensors)


def sort_arguments(bound: inspect.BoundArguments, signature: Sequence[Any] | None) -> Arguments:
    """Find the tensors in the arguments of a call.

    Args:
        bound: the call's arguments.
        signature: the types to convert positional arguments to, as `input_signature` gives them, or None.

    Returns:
        The sorted arguments; numpy arrays count as tensors.

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
    return Arguments(structure, tuple(sorter.tensors), tuple(sorter.names), tuple(sorter.roots))


#: What may hold tensors and is passed as it is: the step uses it, and none of its tensors is cut.
_KNOWN = (tf.Module, tf.Variable, type)


class _Sorter:
    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.names: list[str] = []
        self.roots: list[str] = []

    def _keep(self, root: str, path: str, tensor: Any) -> Slot:
        self.tensors.append(tensor)
        self.names.append(path)
        self.roots.append(root)
        return Slot(len(self.tensors) - 1)

    def place(self, root: str, path: str, value: Any, spec: Any = None) -> Any:
        """A value with slots in place of its tensors, which are cast to the types of a structure like it."""
        if isinstance(spec, tf.TensorSpec) and value is not None:
            return self._keep(root, path, tf.cast(tf.convert_to_tensor(value), spec.dtype))
        if isinstance(value, (np.ndarray, np.generic)):
            return self._keep(root, path, tf.convert_to_tensor(value))
        if isinstance(value, tf.Tensor):
            return self._keep(root, path, value)
        if isinstance(value, tf.__internal__.CompositeTensor) and not isinstance(value, tf.Variable):
            return self._keep(root, path, value)
        if any(map(tf.is_tensor, getattr(value, "__dict__", {}).values())) and not isinstance(value, _KNOWN):
            raise StepError(
                f"Step argument {path!r} is a {type(value).__name__} that holds tensors, which a step cannot find in "
                f"it to cut them. Pass the tensors themselves, or a dictionary, list or named tuple of them."
            )
        specs = dict(_children(spec))
        if specs and specs.keys() != dict(_children(value)).keys():
            raise StepError(
                f"Step argument {path!r} does not have the structure that input_signature gives it. Received: "
                f"{value!r} where the signature has {spec!r}"
            )
        return map_children(value, lambda key, child: self.place(root, f"{path}{key}", child, specs.get(key)))


def _key(value: Any) -> Any:
    """Something hashable that is equal for values with which a function is traced alike, and for no others."""
    if isinstance(value, tf.Variable):
        return value.ref()
    if isinstance(value, (Mapping, list, tuple)):
        return type(value), tuple((key, _key(child)) for key, child in _children(value))
    try:
        hash(value)
    except TypeError:
        return type(value), repr(value)
    return type(value), value


def _children(value: Any) -> list[tuple[str, Any]]:
    """The items of a mapping or sequence, each with how it is reached; none for anything else."""
    found: list[tuple[str, Any]] = []
    map_children(value, lambda key, child: found.append((key, child)))
    return found


def fill(structure: Any, tensors: Sequence[Any]) -> Any:
    """A structure with tensors in place of its slots."""
    if isinstance(structure, Slot):
        return tensors[structure.index]
    return map_children(structure, lambda _, child: fill(child, tensors))


def map_children(value: Any, convert: Any) -> Any:
    """The same mapping or sequence with its items converted; anything else as it is.

    Args:
        value: any object.
        convert: called with how an item is reached, such as "['x']", and the item.
    """
    if isinstance(value, Mapping):
        kind: Any = type(value)
        converted = {k: convert(f"[{k!r}]", v) for k, v in value.items()}
        return kind(value.default_factory, converted) if isinstance(value, defaultdict) else kind(converted)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(convert(f".{f}", v) for f, v in zip(value._fields, value, strict=True)))
    if isinstance(value, (list, tuple)):
        return type(value)(convert(f"[{i}]", v) for i, v in enumerate(value))
    return value

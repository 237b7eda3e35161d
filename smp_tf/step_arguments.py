"""The arguments of a step, sorted: tensors to cut into microbatches, and everything else as it is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


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
        return repr(self.structure), *(repr(tf.type_spec_from_value(t)) for t in self.tensors)


def sort_arguments(bound: inspect.BoundArguments, signature: Sequence[Any] | None) -> Arguments:
    """Find the tensors in the arguments of a call.

    Args:
        bound: the call's arguments.
        signature: the types to convert positional arguments to, as `input_signature` gives them, or None.

    Returns:
        The sorted arguments; numpy arrays count as tensors.
    """
    sorter = _Sorter()
    specs = list(signature or ())
    structure = {}
    for position, (name, value) in enumerate(bound.arguments.items()):
        spec = specs[position] if position < len(specs) and isinstance(specs[position], tf.TensorSpec) else None
        structure[name] = sorter.place(name, name, value, spec)
    return Arguments(structure, tuple(sorter.tensors), tuple(sorter.names), tuple(sorter.roots))


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

    def place(self, root: str, path: str, value: Any, spec: tf.TensorSpec | None = None) -> Any:
        """A value with slots in place of its tensors."""
        if spec is not None and value is not None:
            return self._keep(root, path, tf.cast(tf.convert_to_tensor(value), spec.dtype))
        if isinstance(value, (np.ndarray, np.generic)):
            return self._keep(root, path, tf.convert_to_tensor(value))
        if isinstance(value, tf.Tensor):
            return self._keep(root, path, value)
        if isinstance(value, tf.__internal__.CompositeTensor) and not isinstance(value, tf.Variable):
            return self._keep(root, path, value)
        return map_children(value, lambda key, child: self.place(root, f"{path}{key}", child))


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
        return kind({k: convert(f"[{k!r}]", v) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(convert(f".{f}", v) for f, v in zip(value._fields, value, strict=True)))
    if isinstance(value, (list, tuple)):
        return type(value)(convert(f"[{i}]", v) for i, v in enumerate(value))
    return value

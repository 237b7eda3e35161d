"""Puts the tensors of sets among a step's arguments into an order that all ranks share.

A set has no order. Python iterates over it by hashes, which differ from process to process. But the ranks of a replica
must number the tensors of a batch alike. So items with tensors are ordered by their types:

    {labels.ref(), images.ref()}  ──▶  float32(8, 28, 28): images, int32(8,): labels

Two tensors of one type cannot be ordered in this way, so they are an error. TensorFlow lets a script put these into a
set: references (`tensor.ref()`), since tensors have no hash; sparse tensors; and objects, tuples and frozen sets of
these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.errors import StepError


@dataclass(frozen=True)
class Reference:
    """Stands for `tensor.ref()`, where a structure of arguments has the tensor's slot in place of the tensor."""

    slot: Any


@dataclass(frozen=True)
class SetOf:
    """Stands for a set with tensors, with its items in an order that all ranks share.

    Args:
        kind: the set's class.
        items: what stands for each item.
    """

    kind: type
    items: tuple[Any, ...]

    def filled(self, convert: Callable[[Any], Any]) -> Any:
        """Returns the set with its items converted. It iterates in their order."""
        items = [convert(item) for item in self.items]
        return _FrozenInOrder(items) if issubclass(self.kind, frozenset) else _InOrder(items)


class _InOrder(set):
    """A set that iterates in the order in which it was made. Later items come last."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._order = tuple(items)
        super().__init__(self._order)

    def __iter__(self) -> Iterator[Any]:
        return _in_order(self, super().__iter__())


class _FrozenInOrder(frozenset):
    """A frozen set that iterates in the order in which it was made."""

    _order: tuple[Any, ...]

    def __new__(cls, items: Iterable[Any]) -> _FrozenInOrder:
        kept = tuple(items)
        made = super().__new__(cls, kept)
        made._order = kept
        return made

    def __iter__(self) -> Iterator[Any]:
        return _in_order(self, super().__iter__())


def _in_order(items: Any, all_items: Iterator[Any]) -> Iterator[Any]:
    first = [item for item in items._order if item in items]
    known = set(map(id, first))
    return iter([*first, *(item for item in all_items if id(item) not in known)])


def is_reference(item: Any) -> bool:
    """Returns whether an object is `tensor.ref()` of a tensor. References of variables are passed as they are."""
    if not hasattr(item, "deref"):
        return False
    value = item.deref()
    return tf.is_tensor(value) and not isinstance(value, tf.Variable)


def in_order(
    value: Set[Any], path: str, described: Callable[[Any], tuple[str, Sequence[tf.TypeSpec]]]
) -> list[Any] | None:
    """Returns the items of a set in an order that all ranks share; None where none of them has tensors.

    Args:
        value: the set.
        path: words for the set, for messages.
        described: returns what every rank knows of an item: words for its structure, and the types of its tensors.

    Raises:
        StepError: two items cannot be ordered, or an item is a number of NumPy's.
    """
    keys = []
    for item in value:
        if isinstance(item, np.generic):
            raise StepError(
                f"Step argument {path!r} is a {type(value).__name__} with the number {item!r} of NumPy, which would be "
                f"a tensor and could not be in a set. Pass numbers of Python in it, or a list or tuple."
            )
        words, types = described(item)
        keys.append((bool(types), repr(types), words))
    if not any(has_tensors for has_tensors, _, _ in keys):
        return None
    ordered = sorted(zip(keys, value, strict=True), key=lambda pair: pair[0])
    for (first, _), (second, _) in pairwise(ordered):
        if first == second and first[0]:
            raise StepError(
                f"Step argument {path!r} is a {type(value).__name__} in which two items are tensors of one type, "
                f"{first[1]}. A set has no order, so the ranks could not tell which is which. Pass a list, a tuple or "
                f"a dictionary of them."
            )
    return [item for _, item in ordered]

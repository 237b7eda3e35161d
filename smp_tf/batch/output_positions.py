"""Finds where in a step's outputs those lie that the script names, and those that are parts of one composite tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.partition.trace.lower import OutputSlot


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

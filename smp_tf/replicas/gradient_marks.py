"""Marks on gradients, which say that a step returned them, and that they are averaged over the replicas.

A list of a step's gradients is spread over the stages. A gradient is marked when a step's output returns it. In a
graph, what is made from it is recognised by following inputs back. An eager tensor bears the mark itself, and what is
made from it does not. The mark of an average is on the tensor itself, also in a graph, since what is made from it may
be anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_MARK = "_smp_tf_gradient_of_a_step"
_AVERAGED = "_smp_tf_averaged"
_COMPUTED = "_smp_tf_computed"
_UNAVERAGED = "_smp_tf_unaveraged"
_ROWS = "_smp_tf_rows"
_marked: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def mark(value: Any) -> Any:
    """Notes that a tensor, or sparse slices, are a gradient that a step returned, and returns them."""
    for tensor in _tensors(value):
        if hasattr(tensor, "numpy"):
            setattr(tensor, _MARK, True)
        else:
            _marked.setdefault(tensor.graph, set()).add(tensor.name)
    return value


def comes_from_a_step(value: Any) -> bool:
    """Returns whether a tensor, or sparse slices, are such a gradient or, in a graph, were made from one."""
    return any(getattr(t, _MARK, False) if hasattr(t, "numpy") else _made_of_marked(t) for t in _tensors(value))


@dataclass(frozen=True)
class Computed:
    """Where a gradient in a step's graph was made.

    Args:
        behind: an op of that graph after which all tasks of the rank have ended, so that its weights may change.
        bucket: the bucket in which it was averaged over the replicas; None where it was not averaged.
    """

    behind: tf.Operation
    bucket: int | None


def mark_averaged(gradient: Any) -> Any:
    """Notes that a gradient is equal on all replicas that have it, and returns it."""
    setattr(gradient, _AVERAGED, True)
    return gradient


def mark_computed(gradient: Any, computed: Computed) -> Any:
    """Notes on the tensor itself where a gradient was made, and returns it."""
    setattr(gradient, _COMPUTED, computed)
    return gradient


def computed(gradient: Any) -> Computed | None:
    """Returns where a gradient was made, if it comes directly from a step in the graph that is being traced."""
    found: Computed | None = getattr(gradient, _COMPUTED, None)
    return found if found is not None and found.behind.graph is tf.compat.v1.get_default_graph() else None


def is_averaged(value: Any) -> bool:
    """Returns whether a tensor, or sparse slices, are a gradient that was averaged over the replicas."""
    return getattr(value, _AVERAGED, False)


def mark_rows(gradient: Any, rows: tuple[int, int]) -> Any:
    """Notes that a gradient is that of a range of a weight's rows, and returns it."""
    setattr(gradient, _ROWS, rows)
    return gradient


def marked_rows(value: Any) -> tuple[int, int] | None:
    """Returns the range of a weight's rows that a gradient is of; None where it is of the whole weight."""
    rows: tuple[int, int] | None = getattr(value, _ROWS, None)
    return rows


def mark_unaveraged(gradient: Any) -> Any:
    """Notes that a gradient is what this replica alone has computed, and returns it."""
    setattr(gradient, _UNAVERAGED, True)
    return gradient


def is_unaveraged(value: Any) -> bool:
    """Returns whether a tensor, or sparse slices, are a gradient that a step has left for others to average."""
    return getattr(value, _UNAVERAGED, False)


def _made_of_marked(tensor: tf.Tensor) -> bool:
    seen: set[tuple[int, str]] = set()
    stack = [tensor]
    while stack:
        current = stack.pop()
        if hasattr(current, "numpy"):
            if getattr(current, _MARK, False):
                return True
            continue
        graph = current.graph
        if (id(graph), current.name) in seen:
            continue
        seen.add((id(graph), current.name))
        if current.name in _marked.get(graph, ()):
            return True
        stack.extend(t for t in current.op.inputs if t.dtype != tf.resource)
        if not current.op.inputs:
            # The placeholder by which a branch or a function sees an outside tensor.
            stack.extend(out for out, inner in getattr(graph, "captures", ()) if inner is current)
    return False


def _tensors(value: Any) -> Iterable[Any]:
    if isinstance(value, tf.IndexedSlices):
        return (value.values,)
    return (value,) if isinstance(value, tf.Tensor) else ()

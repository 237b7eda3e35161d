"""What is known of a gradient: one mark, found by the very tensor.

    made by                              is_of_step   spread            so it is
    a step, over the replicas            yes          EVERYWHERE        the average
    a step, for the one that updates     yes          Whole("D", 1, 2)  the average, which no other replica has
    a step, for each its rows            yes          SplitOver(...)    rows of the average
    a step, for OneBitAdam               yes          Partial("D")      this replica's summand
    smp.average_gradients                -            EVERYWHERE        the average
    a script, of one of these            in a graph   None              not known

What a script makes of a gradient may be anything, so a mark is that of the very tensor, or sparse slices. Whether
something was made of a step's gradient can be told in a graph only, where its inputs are followed back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.partition.spread import Partial, Spread


@dataclass(frozen=True)
class Computed:
    """Where the gradient that a step's graph gives was made.

    Args:
        ended: an op of that graph after which all tasks of the rank have ended, so that its weights may change.
        bucket: the bucket in which it was averaged over the replicas; None where it was not.
    """

    ended: tf.Operation
    bucket: int | None


@dataclass(frozen=True)
class Mark:
    """What is known of a gradient.

    Args:
        is_of_step: whether a step returned it.
        spread: how the average over the replicas lies, which it is, or a part of; partial where it is what this replica
            alone has computed. None: not known.
        computed: where it was made, in the graph of a step.
    """

    is_of_step: bool = False
    spread: Spread | None = None
    computed: Computed | None = None

    @property
    def is_average(self) -> bool:
        """Whether it is equal on all replicas that have it: the average, or rows of it."""
        return self.spread is not None and not self.is_unaveraged

    @property
    def is_unaveraged(self) -> bool:
        """Whether a step has left it to be averaged."""
        return isinstance(self.spread, Partial)


_NOTHING = Mark()
#: The one attribute in which a tensor holds its mark. A table of all marks would keep graphs alive: a mark may hold an
#: op of its graph.
_HELD = "_smp_tf_mark"


def mark_of(value: Any) -> Mark:
    """Returns what is known of a gradient.

    Args:
        value: a tensor, sparse slices, or whatever else a script takes for a gradient.
    """
    found: Mark = getattr(value, _HELD, _NOTHING)
    return found


def mark(value: Any, **what: Any) -> Any:
    """Adds to what is known of a gradient, and gives it back.

    Args:
        value: a tensor or sparse slices; of anything else nothing is noted.
        what: fields of its `Mark`.
    """
    if isinstance(value, (tf.Tensor, tf.IndexedSlices)):
        setattr(value, _HELD, dataclasses.replace(mark_of(value), **what))
    if isinstance(value, tf.IndexedSlices) and what.get("is_of_step"):
        # A script may make something of the values alone.
        mark(value.values, is_of_step=True)
    return value


def computed(gradient: Any) -> Computed | None:
    """Returns where a gradient was made, if it comes right from a step in the graph that is being traced."""
    found = mark_of(gradient).computed
    return found if found is not None and found.ended.graph is tf.compat.v1.get_default_graph() else None


def comes_from_a_step(value: Any) -> bool:
    """Returns whether a tensor, or sparse slices, are a step's gradient or, in a graph, were made of one."""
    return mark_of(value).is_of_step or any(map(_is_made_of_a_step, _tensors(value)))


def _is_made_of_a_step(tensor: Any) -> bool:
    """Returns whether a tensor is a step's gradient, or was made of one as far as its graph tells."""
    seen: set[int] = set()
    stack = [tensor]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if mark_of(current).is_of_step:
            return True
        if hasattr(current, "numpy"):
            continue
        stack.extend(t for t in current.op.inputs if t.dtype != tf.resource)
        if not current.op.inputs:
            # What a branch or a function sees of a tensor outside it.
            stack.extend(out for out, inner in getattr(current.graph, "captures", ()) if inner is current)
    return False


def _tensors(value: Any) -> Iterable[Any]:
    if isinstance(value, tf.IndexedSlices):
        return (value.values,)
    return (value,) if isinstance(value, tf.Tensor) else ()

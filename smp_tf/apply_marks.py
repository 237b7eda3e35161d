"""Marks where an optimizer changes weights, for timelines."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf import runtime, tf_internals
from smp_tf.pipeline import marks


def applying(pairs: Sequence[tuple[Any, Any]]) -> contextlib.AbstractContextManager[Any]:
    """A context that stands in a timeline as the apply of this rank.

    Where nothing is split, nothing is marked: a graph is then op for op what it is without smp_tf. What XLA compiles
    cannot be marked.

    Args:
        pairs: gradients and variables that this rank stores.
    """
    running = runtime.current_or_none()
    if running is None or not is_split(running) or tf_internals.is_compiled_by_xla():
        return contextlib.nullcontext()
    variables = [variable for gradient, variable in pairs if gradient is not None]
    if not variables:
        return contextlib.nullcontext()
    gradients = [
        gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        for gradient, _ in pairs
        if gradient is not None
    ]
    return marks.applying(running.topology.mp_rank, gradients, variables)


def is_split(running: runtime.Runtime) -> bool:
    """Whether steps are cut into stages, microbatches or replicas."""
    return running.topology.size > 1 or running.config.microbatches > 1

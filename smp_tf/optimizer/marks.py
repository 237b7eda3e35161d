"""Marks where an optimizer changes weights, for timelines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.job import runtime
from smp_tf.pipeline.run import marks
from smp_tf.replicas.gradient_marks import computed


def applying(pairs: Sequence[tuple[Any, Any]]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that a timeline shows as the apply of this rank.

    Where nothing is split, nothing is marked, so that a graph is op for op what it is without smp_tf. What XLA compiles
    cannot be marked.

    Args:
        pairs: gradients, or None, and variables that this rank updates.
    """
    running = runtime.current_or_none()
    if running is None or not is_split(running) or tf_internals.is_compiled_by_xla():
        return contextlib.nullcontext()
    return _marked(running.topology.stage, [(g, v) for g, v in pairs if g is not None])


@contextlib.contextmanager
def _marked(chunk: int, pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Notes what is done in its context, bucket by bucket."""
    after: dict[int | None, list[Any]] = {}
    changed: dict[int | None, list[Any]] = {}
    for gradient, variable in pairs:
        made = computed(gradient)
        bucket = made.bucket if made is not None else None
        waits_for = after.setdefault(bucket, [made.behind] if made is not None else [])
        waits_for.append(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)
        changed.setdefault(bucket, []).append(variable)
    with contextlib.ExitStack() as together:
        for bucket, waits_for in after.items():
            together.enter_context(marks.applying(chunk, waits_for, changed[bucket], bucket))
        yield


def is_split(running: runtime.Runtime) -> bool:
    """Returns whether steps are cut into stages, microbatches or replicas."""
    return running.topology.size > 1 or running.config.microbatches > 1

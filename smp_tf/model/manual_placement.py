"""Manual placement: `with smp.partition(i):` around layer construction or inside `call()`."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from smp_tf.job.at_shutdown import on_shutdown

_open = threading.local()
_constructed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _stack() -> list[int]:
    if not hasattr(_open, "stages"):
        _open.stages = []
    stages: list[int] = _open.stages
    return stages


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Place the layers called (or constructed) within this context on one partition, and the ops made in `call`.

    Args:
        index: the partition, from 0; the innermost context wins.

    Yields:
        Nothing.

    Raises:
        TypeError: the index is not a whole number.
        ValueError: it is negative.

    Example:
        >>> class Net(smp.DistributedModel):
        ...     def call(self, x):
        ...         with smp.partition(0):
        ...             x = self.first(x)
        ...         with smp.partition(1):
        ...             return self.second(x)
    """
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"A partition is a whole number. Received: {index!r} (of type {type(index).__name__})")
    if index < 0:
        raise ValueError(f"Partitions are numbered from 0. Received: {index}")
    _notice_constructions()
    _stack().append(index)
    try:
        with _noted_in_trace(index):
            yield
    finally:
        _stack().pop()


def _noted_in_trace(index: int) -> contextlib.AbstractContextManager[None]:
    """Within this context, ops that a model makes itself belong to a block of the partition, as if it were a layer."""
    from smp_tf.variables.model_context import step_being_traced

    recorder = getattr(step_being_traced(), "recorder", None)
    if recorder is None or not recorder.in_call or recorder.in_nested_graph:
        return contextlib.nullcontext()
    block: contextlib.AbstractContextManager[None] = recorder.call(f"partition_{index}", "smp.partition", index)
    return block


def _notice_constructions() -> None:
    # Here, since whoever never places a layer by hand needs neither Keras for it nor a patch of it.
    from smp_tf.keras.layers import construction_patch

    if construction_patch.install():
        on_shutdown(construction_patch.remove)


def note_construction(layer: Any) -> None:
    """Remember under which context, if any, a layer was constructed."""
    if _stack():
        _constructed[layer] = _stack()[-1]


def stage_of(layer: Any) -> int | None:
    """The partition asked for a call of this layer: by the context around the call, else around its construction."""
    if _stack():
        return _stack()[-1]
    return _constructed.get(layer)

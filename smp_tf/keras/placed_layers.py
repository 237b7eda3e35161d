"""The partitions that a script asks for layers: by a context around their construction, or around their calls."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

_open = threading.local()
_constructed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _stack() -> list[int]:
    if not hasattr(_open, "stages"):
        _open.stages = []
    stages: list[int] = _open.stages
    return stages


@contextlib.contextmanager
def placed_on(partition: int) -> Iterator[None]:
    """Places what is constructed or called within this context in this thread; the innermost context wins."""
    _stack().append(partition)
    try:
        yield
    finally:
        _stack().pop()


def note_construction(layer: Any) -> None:
    """Remembers under which context, if any, a layer was constructed."""
    if _stack():
        _constructed[layer] = _stack()[-1]


def stage_of(layer: Any) -> int | None:
    """Returns the partition asked for a call of this layer: by the context around the call, else its construction."""
    if _stack():
        return _stack()[-1]
    return _constructed.get(layer)

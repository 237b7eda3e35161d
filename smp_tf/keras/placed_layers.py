"""The partitions that a script asks for layers, by a context around their construction or their calls."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any


class _Open(threading.local):
    #: The partitions of the open contexts, the innermost last.
    stages: tuple[int, ...] = ()


_open = _Open()
_constructed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def placed_on(partition: int) -> Iterator[None]:
    """Places what is constructed or called within this context in this thread. The innermost context wins."""
    before = _open.stages
    _open.stages = (*before, partition)
    try:
        yield
    finally:
        _open.stages = before


def note_construction(layer: Any) -> None:
    """Remembers under which context, if any, a layer was constructed."""
    if _open.stages:
        _constructed[layer] = _open.stages[-1]


def stage_of(layer: Any) -> int | None:
    """Returns the partition asked for a layer's call, by the context around the call or else its construction."""
    if _open.stages:
        return _open.stages[-1]
    return _constructed.get(layer)

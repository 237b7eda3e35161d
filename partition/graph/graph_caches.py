"""Caches of what is read off serialised graphs. Planning asks often, and nobody asks once a program is built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

#: The cached functions of this package, found when their modules are imported.
_CACHED: list[Any] = []


def graph_cache(most: int) -> Callable[[Function], Function]:
    """Keeps a function's results, as `functools.lru_cache` does, until `drop_graph_caches` is called.

    Args:
        most: how many results are kept.

    Example:
        >>> @graph_cache(8)
        ... def length(library: bytes) -> int:
        ...     return len(library)
        >>> length(b"abc")
        3
    """

    def cached(function: Function) -> Function:
        made: Any = functools.lru_cache(maxsize=most)(function)
        _CACHED.append(made)
        return cast(Function, made)

    return cached


def drop_graph_caches() -> None:
    """Forgets all results."""
    for cached in _CACHED:
        cached.cache_clear()

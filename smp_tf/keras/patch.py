"""Replaces methods of other people's classes by ours, for a while."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

#: Stands for an attribute that was not there.
_NOTHING = object()


class Patch(abc.ABC):
    """Methods of Keras's classes replaced by ours, from `install` until `remove`."""

    def __init__(self) -> None:
        # By class and name: what stood there, or that nothing did.
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> bool:
        """Puts ours in place. Doing it twice is doing it once.

        Returns:
            Whether they were not in place before.
        """
        if self._originals:
            return False
        self._replace()
        return True

    def remove(self) -> None:
        """Puts Keras's own back."""
        for owner, name, original in reversed(self._originals):
            if original is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()

    @abc.abstractmethod
    def _replace(self) -> None:
        """Puts ours in place, by `_wrap`."""

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = owner.__dict__[name]
        self._originals.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(wrapper(original)))

    def _add(self, owner: type, name: str, value: Any) -> None:
        """Gives a class an attribute that Keras's does not define itself."""
        if name not in owner.__dict__:
            self._originals.append((owner, name, _NOTHING))
            setattr(owner, name, value)


@contextlib.contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replaces attributes of modules within its context: each a module, a name and what it is to be."""
    with contextlib.ExitStack() as stack:
        for owner, name, ours in attributes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, ours)
        yield

"""Replaces methods of other libraries' classes by ours, for a while."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

#: Stands for an attribute that did not exist.
_NOTHING = object()


class Patch(abc.ABC):
    """Replaces methods of Keras's classes by ours, from `install` until `remove`."""

    def __init__(self) -> None:
        # For each class and name, what was there before, or that nothing was.
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> bool:
        """Puts our methods in place. A second call changes nothing.

        Returns:
            Whether they were not in place before.
        """
        if self._originals:
            return False
        self._replace()
        return True

    def remove(self) -> None:
        """Puts Keras's own methods back."""
        for owner, name, original in reversed(self._originals):
            if original is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()

    @abc.abstractmethod
    def _replace(self) -> None:
        """Puts our method in place, made by `_wrap`."""

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
    """Replaces attributes of modules within its context. Each is given as a module, a name and the new value."""
    with contextlib.ExitStack() as stack:
        for owner, name, ours in attributes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, ours)
        yield

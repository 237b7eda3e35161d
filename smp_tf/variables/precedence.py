"""Notes whether the script or the restore of a checkpoint was the last to give a variable a value.

Before the first step both are only noted. They take effect when it is decided who stores what. The last one wins, as it
does later:

    manager.restore()          moment 1
    model.load_weights(path)   moment 2   ──▶  the first step: what the file holds; the rest from the checkpoint
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_moments = itertools.count(1)
_NOTED = "_smp_given_at"


class _InForce(threading.local):
    moment: int | None = None


_in_force = _InForce()


def now() -> int:
    """Returns a number larger than all earlier ones."""
    return next(_moments) if _in_force.moment is None else _in_force.moment


@contextlib.contextmanager
def as_of(moment: int) -> Iterator[None]:
    """Makes the moment an earlier one within its context, that of a call whose work was put off.

    Args:
        moment: the result of `now` at that time.
    """
    before, _in_force.moment = _in_force.moment, moment
    try:
        yield
    finally:
        _in_force.moment = before


def note(variable: Any) -> None:
    """Notes that a variable is given a value now."""
    # It is noted on the handle, which a variable shares with Keras's wrapper under mixed precision.
    setattr(variable.handle, _NOTED, now())


def is_given_after(variable: Any, moment: int) -> bool:
    """Returns whether a variable was given a value after a moment."""
    return getattr(variable.handle, _NOTED, 0) > moment


@contextlib.contextmanager
def noting(variables: Iterable[Any]) -> Iterator[None]:
    """Notes, within its context, an assignment to one of the variables.

    It is for variables that were built with their values, since smp_tf does not see what is assigned to them before the
    first step.

    Args:
        variables: any variables.
    """

    def noted(variable: Any, assign: Callable[..., Any]) -> Callable[..., Any]:
        def assigned(*args: Any, **kwargs: Any) -> Any:
            note(variable)
            return assign(*args, **kwargs)

        return assigned

    with contextlib.ExitStack() as stack:
        for variable in variables:
            variable.assign = noted(variable, variable.assign)
            stack.callback(delattr, variable, "assign")
        yield

"""Errors of the pipeline room, each a subclass of the built-in error it refines."""

from __future__ import annotations

import math
from typing import Any


class ScheduleError(ValueError):
    """A schedule was asked for that does not exist or is not defined for these numbers."""


class TaskTextError(ValueError):
    """A text does not name a task or a program."""


class ProgramError(ValueError):
    """A list of tasks cannot run: a task is missing, repeated, out of order or waits forever.

    Attributes:
        ranks: the ranks whose lists show the mistake, if some do.
    """

    # This is set after construction. TensorFlow may have to construct an error anew, with the arguments of Exception
    # alone.
    ranks: tuple[int, ...] = ()


def require_at_least(least: int, name: str, value: Any) -> None:
    """Raises an error unless a value is a whole number and large enough.

    Args:
        least: the smallest legal value.
        name: what the value is called.
        value: what was received.

    Raises:
        ScheduleError: it is not. The message names the nearest legal value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        is_number = isinstance(value, int | float) and math.isfinite(value)
        nearest = max(least, math.ceil(value)) if is_number else least
        raise ScheduleError(
            f"{name} is a whole number, {least} or more. Received: {value!r} (of type "
            f"{type(value).__name__}). The nearest legal value is {nearest}"
        )

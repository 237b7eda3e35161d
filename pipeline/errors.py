"""Errors of the pipeline room, each a subclass of the built-in error it refines."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule was asked for that does not exist or is not defined for these numbers."""


class TaskTextError(ValueError):
    """A text does not name a task or a program."""


class ProgramError(ValueError):
    """A list of tasks cannot run: a task is missing, repeated, out of order or waits forever."""

"""The error of this room."""

from __future__ import annotations


class LaunchError(Exception):
    """The ranks of a job cannot be started as asked. The message says who or what is in the way, and what to do."""

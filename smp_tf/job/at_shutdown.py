"""Functions that run at the next `smp.shutdown`, or before this rank says goodbye."""

from __future__ import annotations

from collections.abc import Callable

_at_shutdown: list[Callable[[], None]] = []
_before_leaving: list[Callable[[], None]] = []


def on_shutdown(callback: Callable[[], None]) -> None:
    """Registers a function that runs once, at the begin of the next `smp.shutdown`. The last one runs first."""
    _at_shutdown.append(callback)


def on_leaving(callback: Callable[[], None]) -> None:
    """Registers a function that runs once before this rank says goodbye, at `smp.shutdown` or when Python ends."""
    _before_leaving.append(callback)


def run_at_shutdown() -> None:
    """Runs the functions that were registered for the next `smp.shutdown`."""
    _run(_at_shutdown)


def run_before_leaving() -> None:
    """Runs the functions that were registered to run before this rank says goodbye."""
    _run(_before_leaving)


def _run(callbacks: list[Callable[[], None]]) -> None:
    while callbacks:
        callbacks.pop()()

"""What is done at the next `smp.shutdown`, and before this rank says goodbye."""

from __future__ import annotations

from collections.abc import Callable

_at_shutdown: list[Callable[[], None]] = []
_before_leaving: list[Callable[[], None]] = []


def on_shutdown(callback: Callable[[], None]) -> None:
    """Registers what the next `smp.shutdown` does first, last registered first; it runs once."""
    _at_shutdown.append(callback)


def on_leaving(callback: Callable[[], None]) -> None:
    """Registers what runs once before this rank says goodbye: at the next `smp.shutdown`, or when Python ends."""
    _before_leaving.append(callback)


def run_at_shutdown() -> None:
    """Runs what was registered for the next `smp.shutdown`."""
    _run(_at_shutdown)


def run_before_leaving() -> None:
    """Runs what was registered for the time before this rank says goodbye."""
    _run(_before_leaving)


def _run(callbacks: list[Callable[[], None]]) -> None:
    while callbacks:
        callbacks.pop()()

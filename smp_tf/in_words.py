"""Numbers as people read them."""

from __future__ import annotations


def in_seconds(seconds: float) -> str:
    """Seconds for people, such as "12 ms"."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms"

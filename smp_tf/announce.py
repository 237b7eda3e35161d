"""What the user should know, in plain words."""

from __future__ import annotations

import sys

_said: set[str] = set()


def announce(text: str, rank: int) -> None:
    """Says something once per process, if this is rank 0.

    Args:
        text: One sentence or two.
        rank: This process's world rank.
    """
    if rank == 0 and text not in _said:
        _said.add(text)
        tell(f"smp_tf: {text}")


def tell(text: str) -> None:
    """Writes lines to standard error, in one piece: what another thread writes comes before or after them.

    `print` writes the end of the line by itself.

    Args:
        text: Lines, the last one without its end.
    """
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()

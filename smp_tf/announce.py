"""What the user should know, said once, on rank 0, in plain words."""

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
        print(f"smp_tf: {text}", file=sys.stderr, flush=True)

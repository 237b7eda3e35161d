"""Cases of several jobs, each from its start to its end, in the same processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests import jobs


def run(kinds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Runs jobs one after the other.

    Args:
        kinds: what `jobs.train` is given for each.
    """
    return jobs.run(kinds)


def train(kind: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one job.

    Args:
        kind: what `jobs.train` is given.
    """
    return {"bits": jobs.train(**kind)}

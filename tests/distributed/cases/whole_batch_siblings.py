"""Runs one of the scripts of tests/distributed/siblings with plain Keras and split."""

from __future__ import annotations

from tests.distributed.siblings.table import difference


def compare(kind: str, name: str) -> list[object]:
    """How far off the script is, and where."""
    return list(difference(kind, name))

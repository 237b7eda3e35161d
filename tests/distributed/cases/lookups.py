"""Trains, predicts with and saves models that begin with a lookup; what is wrong is raised."""

from __future__ import annotations

from pathlib import Path

from tests.lookups import check


def checked(variant: str, folder: str) -> str:
    check(variant, Path(folder))
    return "as plain Keras"

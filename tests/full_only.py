"""Parameters of a test of which some run only with `--full`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def params(values: Iterable[Any], only_full: Collection[Any]) -> list[object]:
    """Parameters for `pytest.mark.parametrize`.

    Args:
        values: all of them; tuples where a test takes several at once.
        only_full: those that run only with `--full`.

    Returns:
        One per value, in order.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.full] if value in only_full else []
        )
        for value in values
    ]


def selected(values: Iterable[Any], only_full: Collection[Any], config: pytest.Config) -> list[Any]:
    """Those of such values that this session runs, for a fixture that prepares them all at once.

    Args:
        values: all of them.
        only_full: those that run only with `--full`.
        config: of the session.
    """
    return [value for value in values if value not in only_full or config.getoption("--full")]

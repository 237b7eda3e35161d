"""The examples in the docstrings of what plans and checks programs."""

from __future__ import annotations

import doctest
import importlib

import pytest

PLANNING = ("orders", "placements", "schedule", "schedule_file", "sweeps", "v_orders")
CHECKING = ("check", "draw", "simulate", "stash")
NAMES = ("task", *(f"schedules.{name}" for name in PLANNING), *(f"programs.{name}" for name in CHECKING))


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_true(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"smp_tf.pipeline.{name}"))
    assert tried > 0
    assert failed == 0

"""A plan that an earlier smp_tf wrote is read, and fits its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_tf.command.main import main

STORED = Path(__file__).with_name("stored")


def test_a_stored_plan_is_read(keras_defaults: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        f"{STORED / 'planned.py'}:build",
        "--partition-file",
        str(STORED / "plan-2.json"),
        "--microbatches",
        "2",
    ]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "2 partitions, 2 microbatches, interleaved" in told
    assert "sequential/sequential/dense_1" in told

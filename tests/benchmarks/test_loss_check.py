"""The benchmark of the check of losses: what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.harness import launch_script


@pytest.mark.full
@pytest.mark.distributed
def test_all_ways_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "loss_check.json"
    arguments = f"--size tiny --repetitions 3 --microbatches 2 --json {out}".split()
    outcome = launch_script(2, "benchmarks/loss_check.py", arguments).expect_clean()
    told = json.loads(out.read_text())
    assert {way: len(times) for way, times in told["seconds"].items()} == {"parts": 3, "off": 3, "on": 3}
    assert "2 partitions, 1 replicas, 2 microbatches, GPT tiny, 3 repetitions" in outcome.output(0)

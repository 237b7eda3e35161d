"""The benchmark of saving: what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.harness import launch_script


@pytest.mark.full
@pytest.mark.distributed
def test_all_ways_of_saving_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "saving.json"
    arguments = f"--size tiny --repetitions 2 --microbatches 2 --steps 1 --json {out}".split()
    outcome = launch_script(2, "benchmarks/saving.py", arguments).expect_clean()
    told = json.loads(out.read_text())
    assert {way: len(times) for way, times in told["seconds"].items()} == {"none": 2, "waits": 2, "goes on": 2}
    assert told["bytes"] > 0
    assert "2 partitions, GPT tiny" in outcome.output(0)

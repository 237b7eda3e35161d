"""The benchmark of compressed gradients: what it writes, not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.harness import launch_script


@pytest.mark.full
@pytest.mark.distributed
def test_every_way_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "compression.json"
    arguments = f"--size tiny --rounds 1 --steps 2 --microbatches 2 --json {out}".split()
    outcome = launch_script(2, "benchmarks/compression.py", arguments, deadline=480.0).expect_clean()
    told = json.loads(out.read_text())
    assert {way: len(times) for way, times in told["seconds"].items()} == {"none": 2, "bf16": 2, "fp16": 2, "1bit": 2}
    # What else goes over the loopback at that time is counted too.
    assert {len(counts) for counts in told["bytes_sent"].values()} == {1}
    assert min(count for counts in told["bytes_sent"].values() for count in counts) > 0
    assert "MB sent a step" in outcome.output(0)

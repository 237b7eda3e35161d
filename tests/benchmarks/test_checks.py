"""The benchmark of comparing batches and replicas: what it writes, and that what is due is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.harness import launch_script


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(("partitions", "replicas"), [(1, 2), (2, 1)])
def test_every_way_is_measured(tmp_path: Path, partitions: int, replicas: int) -> None:
    out = tmp_path / "checks.json"
    arguments = f"--size tiny --repetitions 3 --microbatches 2 --partitions {partitions} --json {out}".split()
    outcome = launch_script(2, "benchmarks/checks.py", arguments).expect_clean()
    told = json.loads(out.read_text())
    assert {way: len(times) for way, times in told["seconds"].items()} == {"off": 3, "on": 3, "due": 3}
    assert told["replicas"] == replicas
    assert told["of_a_training"] > 0
    assert f"{partitions} partitions, {replicas} replicas, 2 microbatches, GPT tiny" in outcome.output(0)

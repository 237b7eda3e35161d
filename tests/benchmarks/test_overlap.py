"""The benchmark of averaging beside the rest of a step: what it writes, not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.harness import launch_script


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(("partitions", "ways"), [(1, {"horovod"}), (2, set())])
def test_every_way_is_measured(tmp_path: Path, partitions: int, ways: set[str]) -> None:
    out = tmp_path / "overlap.json"
    arguments = f"--size tiny --repetitions 2 --microbatches 2 --partitions {partitions} --json {out}".split()
    outcome = launch_script(2 * partitions, "benchmarks/overlap.py", arguments).expect_clean()
    told = json.loads(out.read_text())
    assert told["seconds"].keys() == {"beside", "behind", "without"} | ways
    assert {len(times) for times in told["seconds"].values()} == {2}
    assert 0.0 <= told["hidden_by_timelines"] <= 1.0
    assert f"{partitions} partitions, 2 replicas" in outcome.output(0)

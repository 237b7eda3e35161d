"""Replicas agree once on what they average: after the first step Horovod remembers each bucket. All of it is tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import Case, launch

CASES = "tests.distributed.cases.negotiation"
# Rank 0 can be asked to write down what it leads.
ENVIRONMENT = {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_CYCLE_TIME": "5"}
STEPS = 4


@pytest.mark.distributed
@pytest.mark.parametrize(("partitions", "buckets"), [(1, 4), pytest.param(2, 2, marks=pytest.mark.full)])
def test_each_replica_says_once_that_it_has_a_bucket(tmp_path: Path, partitions: int, buckets: int) -> None:
    config = {"partitions": partitions, "microbatches": 2, "seed": 1}
    ways = {"plain": {}, "on the host": {"gradient_offload": True}, "sparse": {}}
    cases = []
    for way, more in ways.items():
        (tmp_path / way).mkdir()
        arguments = {"folder": str(tmp_path / way), "steps": STEPS, "sparse": way == "sparse"}
        cases.append(Case(way, "trained", arguments, {**config, **more}))
    results = launch(2 * partitions, CASES, cases, environment=ENVIRONMENT)
    said = {way: results[way].values()[0]["said"] for way in ways}
    for way in ways:
        for found in results[way].values():
            # Nothing is summed over the replicas but by a task of the list, and each such task sums something.
            averages = {task for task in found["tasks"] if task.lstrip("0123").startswith(("REDUCE", "WEIGH"))}
            assert found["named"].keys() == averages, way
    name = "smp_gradients_step_0"
    # One group of kernel and bias a bucket, and the weight of the batch.
    groups = {f"{name}_{bucket}_float32_{which}of2" for bucket in range(buckets) for which in (1, 2)}
    assert said["plain"] == {averaged: [2, STEPS] for averaged in (*groups, f"{name}_weight_float64_1of1")}
    parts = {f"{name}_{bucket}_float32_{part}" for bucket in range(buckets) for part in ("parts", "sums")}
    assert parts < said["on the host"].keys()
    for way in ("plain", "on the host", "sparse"):
        for averaged, (ready, done) in said[way].items():
            assert done == STEPS, averaged
            if averaged in (f"{name}_sparse_0_values", f"{name}_sparse_0_indices"):
                # As many slices as a batch has rows, in each step other ones: that is agreed upon every time.
                assert ready == 2 * STEPS
            else:
                # Where replicas are all ranks, Horovod still has in its cache what another case has averaged.
                assert ready in (0, 2), averaged
    assert f"{name}_sparse_0_values" in said["sparse"]


@pytest.mark.distributed
def test_all_that_fit_sums_over_replicas_is_a_task() -> None:
    config = {"partitions": 1, "microbatches": 2, "seed": 1}
    cases = [
        Case("alike", "fitted", {}, config),
        Case("shared", "fitted", {}, {**config, "shard_optimizer_state": True}),
    ]
    results = launch(2, CASES, cases)
    for found in results["alike"].values():
        # One of each: the list has all, and each sums something; weights and slots are this replica's own.
        assert found["tasks"][0] == "0WEIGH"
        assert found["tasks"][-2:] == ["0APPLY0", "0LOG"]
        assert found["named"].keys() == {"0WEIGH", "0REDUCE0", "0JOIN", "0LOG"} <= set(found["tasks"])
    for found in results["shared"].values():
        # The norm over the shares, which of one stage is no task, and the weights that replicas give each other.
        assert found["named"].keys() == {"0WEIGH", "0REDUCE0", "0SUM", "0JOIN", "0APPLY", "0LOG"}

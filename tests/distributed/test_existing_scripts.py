"""Scripts written for SageMaker's model parallel library run as they are, with the results of one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.distributed.harness import ONE_THREAD, Outcome, launch_script

SCRIPTS = "tests/distributed/scripts/existing"


def run(size: int, script: str, config: Mapping[str, object] | None = None, launched: bool = True) -> Outcome:
    environment = dict(ONE_THREAD)
    if config is not None:
        environment["SM_HP_MP_PARAMETERS"] = json.dumps(config)
    path = f"{SCRIPTS}/{script}.py"
    return launch_script(size, path, environment=environment, launched=launched).expect_clean()


def lines(outcome: Outcome, start: str, rank: int = 0) -> list[str]:
    return [line for line in outcome.output(rank).splitlines() if line.startswith(start)]


def test_mnist_without_horovod() -> None:
    """The step that only updates metrics was once refused, and the seed set before `smp.init` was overridden."""
    alone, split = run(1, "mnist", launched=False), run(2, "mnist")
    assert len(lines(alone, "Epoch ")) == 3
    assert lines(split, "Epoch ") == lines(split, "Epoch ", rank=1) == lines(alone, "Epoch ")
    assert "The key 'fork' in smp.init is ignored" in split.output(0)
    assert lines(split, "received", rank=1) == ["received True"]
    assert [lines(split, "partitioned", rank) for rank in (0, 1)] == [
        ["partitioned into 2 with 2 variables here"],
        ["partitioned into 2 with 4 variables here"],
    ]


@pytest.fixture(scope="module")
def whole() -> list[str]:
    """What one process prints that is given all replicas' batches."""
    outcome = run(1, "mnist_horovod", {"partitions": 1, "microbatches": 2}, launched=False)
    assert len(lines(outcome, "epoch ")) == 8
    return lines(outcome, "epoch ")


@pytest.mark.parametrize(
    ("size", "config", "local_and_sum"),
    [
        pytest.param(
            4,
            {"partitions": 2, "horovod": True},
            [(0, 0, 2), (0, 1, 4), (1, 2, 2), (1, 3, 4)],
            marks=pytest.mark.full,
        ),
        (2, {"partitions": 1, "placement_strategy": "spread"}, [(0, 0, 1), (1, 1, 1)]),
    ],
)
def test_mnist_with_horovod(
    whole: list[str], size: int, config: dict[str, object], local_and_sum: list[tuple[int, int, int]]
) -> None:
    """Two replicas that share every batch give the losses of one process."""
    split = run(size, "mnist_horovod", {"microbatches": 2, **config})
    assert lines(split, "epoch ") == whole
    for rank, (replica, local, total) in enumerate(local_and_sum):
        told = f"replica {replica} of 2 local rank {local} ranks in all {total}"
        assert lines(split, "replica", rank) == [told]


@pytest.mark.full
def test_layers_placed_by_hand() -> None:
    alone, split = run(1, "manual", launched=False), run(2, "manual")
    assert len(lines(alone, "epoch ")) == 3
    assert lines(split, "epoch ") == lines(alone, "epoch ")
    assert [lines(split, "here:", rank) for rank in (0, 1)] == [
        ["here: net/dense/kernel:0 net/dense_1/kernel:0"],
        ["here: net/dense_2/kernel:0 net/dense_3/kernel:0"],
    ]


@pytest.mark.full
def test_checkpoints_and_a_profile(tmp_path: Path) -> None:
    def run_until(epochs: int, size: int, folder: str) -> list[str]:
        config = json.dumps({"microbatches": 4, "partitions": size})
        arguments = ["--epochs", str(epochs), "--checkpoint-dir", str(tmp_path / folder)]
        environment = {**ONE_THREAD, "SM_HP_MP_PARAMETERS": config}
        path = f"{SCRIPTS}/checkpoints.py"
        outcome = launch_script(
            size, path, arguments, environment=environment, launched=size > 1, deadline=180
        ).expect_clean()
        return lines(outcome, "epoch ")

    whole = run_until(2, 1, "whole")
    assert len(whole) == 8
    assert [*run_until(1, 2, "parts"), *run_until(2, 2, "parts")] == whole
    assert sorted(path.name for path in (tmp_path / "parts").iterdir() if path.suffix == ".json") == [
        "ckpt-1.json",
        "ckpt-2.json",
    ]


@pytest.mark.full
def test_a_text_classifier_with_dropout_and_clipped_gradients() -> None:
    """Clipping failed for every model, and the seed set after `smp.init` was not that of the dropout masks."""
    alone, split = run(1, "text", launched=False), run(2, "text")
    assert len(lines(alone, "epoch ")) == 3
    assert lines(split, "epoch ") == lines(split, "epoch ", rank=1) == lines(alone, "epoch ")


@pytest.mark.full
def test_horovod_in_many_forms() -> None:
    """The first rank that ended shut Horovod down for those of the other partition, which were not done."""
    alone, split = run(1, "horovod_forms", launched=False), run(4, "horovod_forms")
    assert len(lines(alone, "epoch ")) == 2
    assert [lines(split, "epoch ", rank) for rank in (0, 2)] == [lines(alone, "epoch ")] * 2
    assert [lines(split, "at last", rank) for rank in range(4)] == [*[lines(alone, "at last")] * 2, [], []]


@pytest.mark.full
def test_a_residual_network() -> None:
    alone, split = run(1, "resnet", launched=False), run(2, "resnet")
    assert len(lines(alone, "epoch ")) == 2
    assert lines(alone, "steps ") == ["steps 8", "steps 16"]
    for rank in (0, 1):
        assert lines(split, "epoch ", rank) == lines(alone, "epoch ")

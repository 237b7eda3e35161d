"""`fit` over partitions and replicas: the history of one process, on every rank, with all of Keras's callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult, launch

CASES = "tests.distributed.cases.fit"
KINDS = ("two", "masked", "dropout")
# Partitions x replicas, microbatches of one replica: four in all, so that every one has the same samples.
SETTINGS = {"1x1": (1, 1, 4), "2x1": (2, 1, 4), "2x2": (2, 2, 2)}


@pytest.fixture(scope="module")
def histories() -> dict[str, dict[str, CaseResult]]:
    found = {}
    for name, (partitions, replicas, microbatches) in SETTINGS.items():
        config = {"partitions": partitions, "microbatches": microbatches, "seed": 5}
        cases = [Case(kind, "history", {"kind": kind}, config) for kind in KINDS]
        found[name] = launch(partitions * replicas, CASES, cases, deadline=120.0)
    return found


def close(found: Any, wanted: Any, what: str) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=what)


@pytest.mark.distributed
@pytest.mark.parametrize("setting", ["2x1", "2x2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_history_is_that_of_one_process(
    histories: dict[str, dict[str, CaseResult]], kind: str, setting: str
) -> None:
    if kind == "dropout" and setting == "2x2":
        pytest.skip("replicas draw masks of their own, so no single process has the same")
    [wanted] = histories["1x1"][kind].values()
    for rank, found in enumerate(histories[setting][kind].values()):
        assert found["history"].keys() == wanted["history"].keys()
        for part in ("history", "evaluated"):
            for name, values in wanted[part].items():
                # Replicas evaluate batches of their own, which are averaged by samples, not by valid words.
                by_samples = kind == "masked" and setting == "2x2" and (part == "evaluated" or "val_" in name)
                if not by_samples:
                    close(found[part][name], values, f"{part} {name} of rank {rank}")
        for ours, theirs in zip(found["predicted"], wanted["predicted"], strict=True):
            close(ours, theirs, f"predictions of rank {rank}")


@pytest.mark.distributed
def test_progress_is_shown_by_rank_0(histories: dict[str, dict[str, CaseResult]]) -> None:
    for setting, ranks in (("2x1", 2), ("2x2", 4)):
        output = histories[setting]["two"].output
        assert ["Epoch 3/3" in text for text in output] == [True] + [False] * (ranks - 1)


def case(size: int, name: str, function: str, folder: str, **arguments: Any) -> Any:
    config = {"partitions": 2, "microbatches": 2, "seed": 5}
    return pytest.param(LaunchedCase(size, CASES, Case(name, function, arguments, config), deadline=120.0), id=name)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 4])
def test_callbacks_decide_alike_and_write_once(size: int, tmp_path: Path) -> None:
    config = {"partitions": 2, "microbatches": 2, "seed": 5}
    cases = [
        Case("callbacks", "callbacks", {"folder": str(tmp_path / "all")}, config),
        Case(
            "epoch", "interrupted", {"folder": str(tmp_path / "epoch"), "stop_after": 7, "save_freq": "epoch"}, config
        ),
        Case("batch", "interrupted", {"folder": str(tmp_path / "batch"), "stop_after": 7, "save_freq": 3}, config),
        Case("summary", "summary", {}, config),
    ]
    (tmp_path / "all").mkdir()
    found = launch(size, CASES, cases, deadline=120.0)
    ranks = found["callbacks"].values()
    for rank in ranks:
        assert rank["epochs"] == [0, 1, 2]
        for name, values in ranks[0]["history"].items():
            assert rank["history"][name] == values, name
        assert rank["batches"] == ranks[0]["batches"]
        # Of a checkpoint, whose data lie in any number of files, the index alone.
        assert [name for name in rank["files"] if ".data-" not in name] == [
            "best.weights.h5", "board", "checkpoint", "checkpoints", "epoch-1.index", "epoch-2.index", "epoch-3.index",
            "log.csv", "pipeline", "whole", "whole.keras",
        ]  # fmt: skip
    assert ranks[0]["history"]["lr"] == pytest.approx([0.009, 0.0081, 0.003645])
    np.testing.assert_allclose(ranks[0]["rows"], ranks[0]["history"]["loss"], rtol=1e-6)
    assert "samples/s, bubble of the plan" in ranks[0]["printed"]
    assert "Epoch 3/6" in ranks[0]["printed"]
    for rank in ranks[1:]:
        assert rank["printed"] == ""
    for name, batches in (("epoch", 10), ("batch", 9)):
        for rank in found[name].values():
            np.testing.assert_allclose(rank["again"][-1], rank["expected"][-1], rtol=1e-5)
            assert (rank["batches"], rank["left"]) == (batches, False)
    for rank in found["summary"].values():
        assert "Which rank stores a layer is decided at the first step." in rank["before"]
        assert rank["after"] == found["summary"].values()[0]["after"]


@pytest.mark.distributed
def test_replicas_with_different_numbers_of_batches_are_told() -> None:
    config = {"partitions": 1, "microbatches": 2, "seed": 5}
    cases = [Case(name, "unequal", {"known": name == "known"}, config) for name in ("unknown", "known")]
    found = launch(2, CASES, cases, deadline=60.0)
    for rank in found["unknown"].values():
        assert rank["said"].startswith("The data of replica 0 of 2 ended before batch 3 of the training, and others")
    said = [rank["said"] for rank in found["known"].values()]
    for text in said:
        assert "the metrics at the end of an epoch or evaluation" in text
        assert "batch 3 of the training" in text

"""What `model.profile` measures decides where the model is cut, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import Case, launch

CASES = "tests.distributed.cases.profile"


@pytest.mark.distributed
@pytest.mark.alone
def test_layers_that_were_seen_to_take_long_are_on_different_stages(tmp_path: Path) -> None:
    config = {"partitions": 2, "microbatches": 2, "seed": 3, "optimize": "speed"}
    kept = {"profiled": True, "folder": str(tmp_path)}
    asked = {"estimated": {"profiled": False}, "measured": kept, "found": kept, "damaged": {**kept, "damage": True}}
    results = launch(2, CASES, [Case(name, "train", arguments, config) for name, arguments in asked.items()])
    values = {name: result.values() for name, result in results.items()}
    for name in ("measured", "found", "damaged"):
        assert [rank["layers"] for rank in values[name]] == [["slow0"], ["block0", "block1", "block2", "slow1"]], name
    assert [rank["layers"] for rank in values["estimated"]] != [rank["layers"] for rank in values["measured"]]
    for rank in (rank for ranks in values.values() for rank in ranks):
        # Where it is cut, and that it was measured, changes no number: masks and initial weights are the same.
        assert rank["losses"] == pytest.approx(values["measured"][0]["losses"], rel=1e-6)
        assert rank["too_late"].startswith("Model 'net' has run a step already, by whose plan it stays.")
    # Each rank has measured some of the units, and all have the times of all, found or measured.
    shares = [rank["ran"] for rank in values["measured"]]
    assert sorted(shares[0] + shares[1]) == [
        "net/block0",
        "net/block1",
        "net/block2",
        "net/drop",
        "net/slow0",
        "net/slow1",
    ]
    assert sorted(map(len, shares)) == [3, 3]
    assert {"net/slow0", "net/slow1"} & {*shares[0]} != {"net/slow0", "net/slow1"}
    assert values["measured"][0]["times"] == values["measured"][1]["times"]
    assert [rank["ran"] for rank in values["found"]] == [[], []]
    assert [rank["times"] for rank in values["found"]] == [rank["times"] for rank in values["measured"]]
    assert [len(rank["ran"]) for rank in values["damaged"]] == [3, 3]
    assert "are known from an earlier profile; nothing is measured" in results["found"].output[0]
    assert "is damaged and not used" in results["damaged"].output[0]

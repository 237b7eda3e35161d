"""What `model.profile` measures decides where the model is cut, and nothing else."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Case, launch

CASES = "tests.distributed.cases.profile"


@pytest.mark.distributed
def test_layers_that_were_seen_to_take_long_are_on_different_stages() -> None:
    config = {"partitions": 2, "microbatches": 2, "seed": 3, "optimize": "speed"}
    cases = [Case(f"{profiled}", "train", {"profiled": profiled}, config) for profiled in (True, False)]
    results = launch(2, CASES, cases)
    measured, estimated = results["True"].values(), results["False"].values()
    assert [rank["layers"] for rank in measured] == [["slow0"], ["block0", "block1", "block2", "slow1"]]
    assert [rank["layers"] for rank in estimated] != [rank["layers"] for rank in measured]
    for rank in (*measured, *estimated):
        # Where it is cut, and that it was measured, changes no number: masks and initial weights are the same.
        assert rank["losses"] == pytest.approx(measured[0]["losses"], rel=1e-6)
        assert rank["too_late"].startswith("Model 'net' has run a step already, by whose plan it stays.")

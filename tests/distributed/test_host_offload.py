"""Replicas whose gradients, and slots, are in the host's memory train as those that have all on the device."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch, launch_script
from tests.distributed.test_replicas import TOLERANCE, compare
from tests.full_only import params, selected

CASES = "tests.distributed.cases.host_offload"
SLOTS = "tests.distributed.cases.sharded_slots"
REPLICAS = "tests.distributed.cases.replicas"
#: What decides by all gradients, and what looks at a weight as a whole; the second with --full only.
OPTIMIZERS = ("clipped", "adafactor")
ONLY_FULL = ("adafactor",)
#: With sparse gradients, and shares of samples that differ and change.
MODEL = "sparse_embedding"


def config(partitions: int, **more: Any) -> dict[str, Any]:
    return {"partitions": partitions, "microbatches": 2, "seed": 1, **more}


def trainings(request: pytest.FixtureRequest, partitions: int, **more: Any) -> list[Case]:
    names = selected(OPTIMIZERS, ONLY_FULL, request.config)
    return [Case(name, "trained", {"optimizer": name}, config(partitions, **more)) for name in names]


def on_shares(partitions: int, **more: Any) -> list[Case]:
    return [Case(f"shares, {MODEL}", "train_on_shares", {"model": MODEL, "eager": False}, config(partitions, **more))]


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """One process, which has all on its device."""
    return launch(1, SLOTS, trainings(request, 1)) | launch(1, REPLICAS, on_shares(1))


@pytest.fixture(scope="module")
def offloaded(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Two partitions and two replicas."""
    found = launch(4, SLOTS, trainings(request, 2, optimizer_offload=True))
    if request.config.getoption("--full"):
        found |= launch(4, REPLICAS, on_shares(2, gradient_offload=True))
    return found


@pytest.fixture(scope="module")
def of_one_stage() -> dict[str, CaseResult]:
    """Two replicas of one partition, and more than one key."""
    listed = [
        Case("in parts", "sent", {}, config(1, gradient_offload=True)),
        Case("in parts, bf16", "sent", {}, config(1, gradient_offload=True, gradient_compression="bf16")),
        Case("legacy", "legacy", {}, config(1, optimizer_offload=True)),
    ]
    return launch(2, CASES, listed) | launch(2, REPLICAS, on_shares(1, gradient_offload=True))


@pytest.mark.parametrize("name", params(OPTIMIZERS, ONLY_FULL))
def test_every_optimizer_gives_the_weights_of_one_process(
    whole: dict[str, CaseResult], offloaded: dict[str, CaseResult], name: str
) -> None:
    [alone] = whole[name].values()
    ranks = offloaded[name].values()
    for rank in ranks:
        assert rank["iterations"] == 4
        for weight, value in rank["weights"].items():
            np.testing.assert_allclose(value, alone["weights"][weight], rtol=1e-9, atol=1e-12, err_msg=weight)
    assert {weight for rank in ranks for weight in rank["weights"]} == alone["weights"].keys()


@pytest.mark.parametrize("where", ["of_one_stage", pytest.param("offloaded", marks=pytest.mark.full)])
def test_replicas_with_shares_of_other_sizes_give_the_weights_of_one_process(
    whole: dict[str, CaseResult], where: str, request: pytest.FixtureRequest
) -> None:
    name = f"shares, {MODEL}"
    [alone] = whole[name].values()
    compare(request.getfixturevalue(where)[name], alone, TOLERANCE[MODEL])


@pytest.mark.parametrize(("name", "bytes_each"), [("in parts", 4), ("in parts, bf16", 2)])
def test_every_replica_sends_as_much_of_weights_of_very_different_sizes(
    of_one_stage: dict[str, CaseResult], name: str, bytes_each: int
) -> None:
    ranks = of_one_stage[name].values()
    first, second = (rank["sent"] for rank in ranks)
    assert first == second
    assert first.keys() == {"alltoall", "allgather"}
    # All gradients once, and of the sums a half; little else.
    wanted = bytes_each * ranks[0]["gradients"] / 4
    assert wanted <= first["alltoall"] <= 1.02 * wanted + 64
    assert wanted / 2 <= first["allgather"] <= 1.02 * wanted / 2 + 64


def test_an_optimizer_that_keeps_slots_beside_its_weights_is_refused(of_one_stage: dict[str, CaseResult]) -> None:
    for said in of_one_stage["legacy"].values():
        assert said.startswith("optimizer_offload keeps slots on the host, and tf_keras.optimizers.legacy.Adam keeps")


@pytest.mark.parametrize("partitions", [1, pytest.param(2, marks=pytest.mark.full)])
def test_weights_on_another_device_than_the_host(partitions: int) -> None:
    """The fences of a step were once placed where all variables are; so no model could be on a GPU.

    TensorFlow's count of steps, for one, is on the host. And averages of what is on the host were once made on the
    device, from which they came back.
    """
    outcome = launch_script(
        2 * partitions, "tests/distributed/scripts/two_devices.py", [str(partitions)]
    ).expect_clean()
    assert "on the host: gradients and slots, " in outcome.output(0)
    for rank in range(2 * partitions):
        lines = [line for line in outcome.output(rank).splitlines() if line.startswith("found ")]
        told = [json.loads(line.removeprefix("found ")) for line in lines]
        if partitions == 1:
            # First two stages of one replica.
            stages, offloaded, *told = told
            assert stages["weights"] == stages["sums"] == stages["slots"] == offloaded["weights"] == ["CPU:1"]
            assert offloaded["sums"] == offloaded["slots"] == offloaded["updates"] == ["CPU:0"]
            assert stages["losses"][2] < stages["losses"][0]
            np.testing.assert_allclose(offloaded["losses"], stages["losses"], rtol=1e-5)
        plain, *others = told
        gradients, optimizer, *single = others
        assert plain["weights"] == plain["sums"] == ["CPU:1"]
        assert gradients["sums"] == optimizer["sums"] == ["CPU:0"]
        # One microbatch is its own sum.
        assert [found["sums"] for found in single] == [[]] * (partitions - 1)
        # A replica may have no share of a stage's slots.
        of_share = ["CPU:0"] if optimizer["slots"] else []
        assert optimizer["slots"] == optimizer["updates"] == of_share
        for found in (plain, gradients, *single):
            assert found["slots"] == ["CPU:1"]
            # Without a word from smp_tf, beside the weight.
            assert found["updates"] == [""]
        for found in others:
            assert found["weights"] == ["CPU:1"]
            # Where the optimizer is on the device, they are clipped there.
            assert set(found["averages"]) - ({""} if found is not optimizer else set()) == {"CPU:0"}
            np.testing.assert_allclose(found["losses"], plain["losses"], rtol=1e-5)
            assert found["losses"][2] < found["losses"][0]

"""Three replicas train as one process does: nothing of what they exchange goes by halves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch
from tests.distributed.test_replicas import TOLERANCE, compare

SLOTS = "tests.distributed.cases.sharded_slots"
REPLICAS = "tests.distributed.cases.replicas"
ONE_BIT = "tests.distributed.cases.one_bit"
#: With sparse gradients, and shares of samples that differ and change.
MODEL = "sparse_embedding"
#: Of a net whose weights are given out whole, 240 elements of 716.
LARGEST_SHARE = 0.336


def config(**more: Any) -> dict[str, Any]:
    return {"partitions": 1, "microbatches": 2, "seed": 1, **more}


#: How the optimizer's slots and gradients are kept.
KEPT = {"shared slots": {"shard_optimizer_state": True}, "gradients on the host": {"gradient_offload": True}}


def on_shares(**more: Any) -> Case:
    return Case("shares", "train_on_shares", {"model": MODEL, "eager": False}, config(**more))


def one_bit(**more: Any) -> Case:
    return Case("one bit", "shares", {"warmup": 3}, config(**more))


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """One process."""
    gradients = Case("gradients", "gradients", {"of": 3}, config())
    more = [on_shares()] if request.config.getoption("--full") else []
    return (
        launch(1, SLOTS, [Case("adam", "trained", {"optimizer": "adam"}, config())])
        | launch(1, REPLICAS, [gradients, *more])
        | launch(1, ONE_BIT, [one_bit()])
    )


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Three replicas of one partition."""
    trained = [Case(name, "trained", {"optimizer": "adam"}, config(**more)) for name, more in KEPT.items()]
    compressed = Case("gradients", "gradients", {}, config(gradient_compression="bf16"))
    # Every size of a share is traced.
    more = [on_shares(shard_optimizer_state=True)] if request.config.getoption("--full") else []
    return (
        launch(3, SLOTS, trained)
        | launch(3, REPLICAS, [compressed, *more])
        | launch(3, ONE_BIT, [one_bit(gradient_compression="1bit")])
    )


@pytest.mark.parametrize("name", KEPT)
def test_weights_are_those_of_one_process(
    found: dict[str, CaseResult], whole: dict[str, CaseResult], name: str
) -> None:
    [alone] = whole["adam"].values()
    for rank in found[name].values():
        assert rank["weights"].keys() == alone["weights"].keys()
        for weight, value in rank["weights"].items():
            np.testing.assert_allclose(value, alone["weights"][weight], rtol=1e-9, atol=1e-12, err_msg=weight)


def test_every_slot_is_on_one_replica_and_shares_are_about_equal(found: dict[str, CaseResult]) -> None:
    ranks = found["shared slots"].values()
    kept = [rank["slots"] for rank in ranks]
    assert sorted(weight for slots in kept for weight in slots) == sorted(ranks[0]["sizes"])
    shares = [sum(slots.values()) for slots in kept]
    assert max(shares) <= LARGEST_SHARE * sum(shares)


@pytest.mark.full
def test_shares_of_other_sizes_give_the_weights_of_one_process(
    found: dict[str, CaseResult], whole: dict[str, CaseResult]
) -> None:
    [alone] = whole["shares"].values()
    compare(found["shares"], alone, TOLERANCE[MODEL])


def test_compressed_gradients_are_nearly_those_of_one_process(
    found: dict[str, CaseResult], whole: dict[str, CaseResult]
) -> None:
    [alone] = whole["gradients"].values()
    first, *others = found["gradients"].values()
    assert len(first["gradients"]) == 4
    for name, value in first["gradients"].items():
        wanted = alone["gradients"][name]
        assert not np.array_equal(value, wanted), "nothing was rounded"
        # Of each replica's and of the sum.
        np.testing.assert_allclose(value, wanted, rtol=0, atol=2.0**-7 * 2 * np.abs(wanted).max(), err_msg=name)
        for other in others:
            np.testing.assert_array_equal(other["gradients"][name], value, err_msg=name)
    np.testing.assert_allclose(first["own"], alone["own"], rtol=0, atol=2.0**-7 * 2 * np.abs(alone["own"]).max())


def test_one_bit_an_element_begins_as_one_process_and_keeps_replicas_equal(
    found: dict[str, CaseResult], whole: dict[str, CaseResult]
) -> None:
    [alone] = whole["one bit"].values()
    first, *others = found["one bit"].values()
    for weight, value in first["warm"].items():
        np.testing.assert_allclose(value, alone["warm"][weight], rtol=1e-6, err_msg=weight)
        assert (first["weights"][weight] != value).any()
        for other in others:
            np.testing.assert_array_equal(other["weights"][weight], first["weights"][weight], err_msg=weight)

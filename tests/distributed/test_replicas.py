"""Replicas that each train on a part of the batch give the weights of one process on the whole."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch

CASES = "tests.distributed.cases.replicas"
TOLERANCE = {"mlp": 1e-12, "mlp_adam_float32": 1e-4}
SHARES = {"shares of different sizes": False, "shares of different sizes, eager": True}


def cases(partitions: int, replicas: int, strategy: str = "cluster") -> list[Case]:
    config = {"partitions": partitions, "microbatches": 2, "seed": 1, "placement_strategy": strategy}
    alike = [Case(model, "train", {"model": model}, config) for model in TOLERANCE]
    shares = [
        Case(name, "train_on_shares", {"model": "mlp", "eager": eager}, config)
        for name, eager in SHARES.items()
        if (partitions, replicas, eager) in ((1, 1, False), (1, 2, True), (2, 2, False))
    ]
    return alike + shares


@pytest.fixture(scope="module")
def whole() -> dict[str, CaseResult]:
    """One process, which has every sample."""
    return launch(1, CASES, cases(1, 1))


@pytest.mark.parametrize(("partitions", "replicas", "strategy"), [(1, 2, "cluster"), (2, 2, "cluster"), (3, 2, "PDT")])
def test_weights_are_those_of_one_process(
    whole: dict[str, CaseResult], partitions: int, replicas: int, strategy: str
) -> None:
    """Horovod once refused float32 gradients: the sum of their weights is a float64.

    Replicas once had to have batches of the same size.
    """
    launched = launch(partitions * replicas, CASES, cases(partitions, replicas, strategy))
    for case in cases(partitions, replicas):
        tolerance = TOLERANCE.get(case.name, 1e-12)
        wanted = whole[case.name.removesuffix(", eager")].values()[0]["variables"]
        ranks = launched[case.name].values()
        for replica in range(replicas):
            got: dict[str, np.ndarray] = {}
            for rank in ranks:
                got |= rank["variables"] if rank["replica"] == replica else {}
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=case.name + name)

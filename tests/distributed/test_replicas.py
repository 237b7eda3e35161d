"""Replicas that each train on a part of the batch give the weights of one process on the whole."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch

CASES = "tests.distributed.cases.replicas"
TOLERANCE = {"mlp": 1e-12, "mlp_adam_float32": 1e-4, "sparse_embedding": 1e-9}


def cases(partitions: int, strategy: str = "cluster") -> list[Case]:
    config = {"partitions": partitions, "microbatches": 2, "seed": 1, "placement_strategy": strategy}
    return [Case(model, "train", {"model": model}, config) for model in TOLERANCE]


@pytest.fixture(scope="module")
def whole() -> dict[str, CaseResult]:
    """One process, which has every sample."""
    return launch(1, CASES, cases(1))


@pytest.mark.parametrize(("partitions", "replicas", "strategy"), [(1, 2, "cluster"), (2, 2, "cluster"), (3, 2, "PDT")])
def test_weights_are_those_of_one_process(
    whole: dict[str, CaseResult], partitions: int, replicas: int, strategy: str
) -> None:
    """Horovod once refused float32 gradients: the sum of their weights is a float64; and sparse ones were refused."""
    launched = launch(partitions * replicas, CASES, cases(partitions, strategy))
    for model, tolerance in TOLERANCE.items():
        wanted = whole[model].values()[0]["variables"]
        ranks = launched[model].values()
        for replica in range(replicas):
            got: dict[str, np.ndarray] = {}
            for rank in ranks:
                got |= rank["variables"] if rank["replica"] == replica else {}
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=f"{model} {name}")

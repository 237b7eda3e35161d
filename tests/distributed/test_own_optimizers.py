"""A script's own `apply_gradients` runs once, on this rank's averages alone, over partitions and replicas."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Case, launch
from tests.full_only import params, selected
from tests.own_optimizers import FEW, FORMS

CASES = "tests.distributed.cases.own_optimizers"
SETTINGS = {
    "2 partitions": {"partitions": 2, "microbatches": 2},
    "2 replicas": {"partitions": 1, "microbatches": 2, "shard_optimizer_state": True},
}


@pytest.mark.distributed
@pytest.mark.parametrize("setting", params(SETTINGS, ["2 replicas"]))
def test_the_weights_are_those_of_plain_keras(setting: str, request: pytest.FixtureRequest) -> None:
    forms = selected(list(FORMS), [form for form in FORMS if form not in FEW], request.config)
    [result] = launch(2, CASES, [Case(setting, "differences", {"forms": forms}, SETTINGS[setting])]).values()
    for found in result.values():
        assert {form: value for form, value in found.items() if value > 1e-5} == {}
        assert len(found) == len(forms)

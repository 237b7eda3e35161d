"""Random models, cut at random, are trained as in one process.

Hypothesis draws models, partitions, microbatches, schedules and placements. Plain Keras trains each in this process;
where dropout draws masks, which plain Keras draws differently, smp_tf does so in one process. A model that goes wrong
is printed as JSON, from which `RandomModel.of` makes it again: what is wrong with it becomes a test of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.distributed import reference
from tests.distributed.case_worker import forget_last_case
from tests.distributed.harness import Case, CaseResult, launch
from tests.distributed.random_models import STEPS, RandomModel, random_models

CASES = "tests.distributed.cases.random_models"


@pytest.fixture(autouse=True)
def _keras_as_before() -> Iterator[None]:
    """Plain Keras trains in this process, in float64: tests after these once failed for it."""
    yield
    forget_last_case()


def drawn(count: int, partitions: Sequence[int]) -> list[RandomModel]:
    """The same models every time."""
    found: list[RandomModel] = []

    @settings(
        max_examples=count, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), deadline=None,
    )  # fmt: skip
    @given(random_models(partitions))
    def collect(model: RandomModel) -> None:
        found.append(model)

    collect()
    return list(dict.fromkeys(found))


def compare(model: RandomModel, result: CaseResult, alone: CaseResult | None, replicas: int) -> bool:
    """Fails where a rank's losses or weights are not those of one process; says whether it was trained at all."""
    ranks = result.values()
    refused = {rank.get("refused") for rank in ranks}
    if refused != {None}:
        # A model may have fewer layers with weights than there are partitions.
        assert len(refused) == 1, refused
        assert re.search(r"The model has \d+ units? that can be put on different partitions", str(refused)), refused
        return False
    if alone is not None:
        [only] = alone.values()
        losses, final = only["losses"], only["variables"]
        statistics = set()
    else:
        told = reference.train(model.entry(), [model.microbatches], replicas, STEPS)[model.microbatches]
        losses, final = told["losses"], {str(number): told[f"final_{number}"] for number in range(len(told["names"]))}
        # Those of batch normalisation are of a replica's own samples.
        statistics = {str(number) for number, name in enumerate(told["names"]) if replicas > 1 and "/moving_" in name}
    for rank in ranks:
        if replicas == 1:
            np.testing.assert_allclose(rank["losses"], losses, rtol=1e-9, err_msg="losses")
        for number in rank["variables"].keys() - statistics:
            value = rank["variables"][number]
            np.testing.assert_allclose(value, final[number], rtol=1e-8, atol=1e-10, err_msg=f"variable {number}")
    assert {number for rank in ranks if rank["replica"] == 0 for number in rank["variables"]} == final.keys()
    return True


def check(size: int, models: Sequence[RandomModel], record: Callable[[str, object], None]) -> None:
    """Trains models on some processes and compares each; fails with all that were wrong."""

    def cases(only: Sequence[RandomModel], **config: object) -> list[Case]:
        return [Case(str(models.index(m)), "train", {"model": m.as_json()}, {**m.config, **config}) for m in only]

    split = launch(size, CASES, cases(models))
    masked = [model for model in models if model.is_random and model.partitions == size]
    alone = launch(1, CASES, cases(masked, partitions=1)) if masked else {}
    wrong, trained = [], 0
    for number, model in enumerate(models):
        replicas = size // model.partitions
        if model.is_random and replicas > 1:
            # Every replica draws masks of its own, which no single process draws: to run is all that is asked of it.
            split[str(number)].values()
            continue
        try:
            trained += compare(model, split[str(number)], alone.get(str(number)), replicas)
        except AssertionError as error:
            wrong.append(f"{json.dumps(model.as_json())}\n{error}")
    record("counted", f"{trained} of {len(models)} random models, trained on {size} processes, compared with one")
    assert not wrong, "\n\n".join([f"{len(wrong)} of {len(models)} went wrong:", *wrong])
    assert trained >= len(models) // 2


@pytest.mark.distributed
def test_random_models_are_trained_as_in_one_process(record_property: Callable[[str, object], None]) -> None:
    # The first is the simplest that there is: dense layers, as in every other test.
    check(2, drawn(3, (2,))[1:], record_property)


@pytest.mark.full
@pytest.mark.distributed
# Of 100 models; beside other tests longer than a test has by default.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("size", "partitions"), [(4, (2, 4)), (3, (3,)), (2, (2,))])
def test_many_random_models_are_trained_as_in_one_process(
    size: int, partitions: tuple[int, ...], record_property: Callable[[str, object], None]
) -> None:
    check(size, drawn(100, partitions), record_property)

"""Models of the package transformers, trained split over processes, give what one plain Keras process gives.

Each is given to smp_tf as a user would: wrapped, or as a layer of a distributed model; called with a dictionary or by
names; with the loss that it computes of its labels itself, or one outside; in a loop of the script's own or by `fit`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.distributed.comparison import References, Setting, compare
from tests.distributed.conftest import LaunchCache, LaunchedCase
from tests.distributed.harness import Case, CaseResult

CASES = "tests.distributed.cases.transformers_models"
ZOO = "tests.distributed.transformers_models"
DEADLINE = 240.0

# By partitions and microbatches. They run with --full: every process imports transformers, and so does the example with
# a BERT, which runs always.
MODELS = (
    *("bert_masked", "bert_in_model", "gpt2", "distilbert", "roberta_in_model"),
    *("electra", "t5", "vit_in_model", "segformer"),
)
SETTINGS = {*itertools.product(MODELS, (2,), (2,)), *itertools.product(MODELS, (4,), (3,))}
FITTED = {*itertools.product(("gpt2", "t5", "distilbert", "vit_in_model"), (2, 4))}


def launched(model: str, function: str, partitions: int, microbatches: int) -> Any:
    setting = Setting(model, partitions, "fit" if function == "fit" else microbatches, "interleaved")
    config = {"partitions": partitions, "microbatches": microbatches, "seed": 1}
    case = Case(f"{function}-{model}-P{partitions}-M{microbatches}", function, {"model": model}, config)
    wanted = LaunchedCase(partitions, CASES, case, deadline=DEADLINE)
    return pytest.param(setting, wanted, id=case.name, marks=pytest.mark.full)


def trained() -> Iterator[Any]:
    for model, partitions, microbatches in sorted(SETTINGS):
        yield launched(model, "train", partitions, microbatches)


def fitted() -> Iterator[Any]:
    for model, partitions in sorted(FITTED):
        yield launched(model, "fit", partitions, 2)


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """What plain Keras gives for all that this session selected."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    settings = [spec.params["setting"] for spec in specs if spec is not None and "setting" in spec.params]
    wanted = dict.fromkeys((setting.model, setting.microbatches) for setting in settings)
    started = References(ZOO, tmp_path_factory.mktemp("references"), list(wanted))
    yield started
    started.end()


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("setting", "launched"), list(trained()))
def test_split_training_equals_one_process(setting: Setting, references: References, case_result: CaseResult) -> None:
    from tests.distributed.transformers_models import MODELS

    found = compare(MODELS[setting.model], case_result.values(), references.of(setting.model, setting.microbatches))
    assert not found.wrong, "\n".join([f"{setting}:", *found.wrong])


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("setting", "launched"), list(fitted()))
def test_fit_gives_the_history_of_one_process(
    setting: Setting, references: References, case_result: CaseResult
) -> None:
    wanted = references.of(setting.model, setting.microbatches)
    assert {"loss", "val_loss", "evaluated"} <= wanted.keys()
    for rank, found in enumerate(case_result.values()):
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=f"{name} of rank {rank}")


def dropout(partitions: int) -> LaunchedCase:
    config = {"partitions": partitions, "microbatches": 2, "seed": 1}
    return LaunchedCase(
        partitions, CASES, Case("dropout", "train", {"model": "distilbert_dropout"}, config), deadline=DEADLINE
    )


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("launched", [pytest.param(dropout(p), id=f"P{p}") for p in (2, 4)])
def test_dropout_draws_the_same_on_any_number_of_partitions(
    case_result: CaseResult, launch_cache: LaunchCache, request: pytest.FixtureRequest
) -> None:
    [alone] = launch_cache.get(dropout(1), request.session.items).values()
    for rank, found in enumerate(case_result.values()):
        np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-5, err_msg=f"rank {rank}")


def test_every_model_is_trained() -> None:
    from tests.distributed.transformers_models import FITS
    from tests.distributed.transformers_models import MODELS as ZOO_MODELS

    assert set(ZOO_MODELS) == {*MODELS, "distilbert_dropout"}
    assert set(FITS) == {model for model, _ in FITTED}

"""Training split over processes gives the very bits that one plain Keras process gives.

Where TensorFlow rewrites a graph before it runs it, what it fuses depends on what else the graph has: a cut between a
matrix product and its activation leaves two roundings where one process has one. In bfloat16 that is seen in the third
digit. So here TensorFlow leaves the graphs as they are, on both sides, and what is left is what smp_tf answers for:
the same ops, on the same microbatches, with gradients added in the same order.

Not so are models in which two gradients of one weight or one activation are added in another order than Keras does (a
weight used twice, a skip over stages), and batches that microbatches do not divide: test_equality compares those.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from tests.distributed.comparison import References, Setting
from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult
from tests.distributed.test_equality import CASES, MICROBATCHES, PARTITIONS, SCHEDULES, ZOO

BFLOAT16 = [Setting("mixed_bfloat16", *rest) for rest in itertools.product(PARTITIONS, MICROBATCHES, SCHEDULES)]
# On one size of worlds: each is a start of its own.
BY_DEFAULT = (
    Setting("mixed_bfloat16", 2, 1, "simple"),
    Setting("cnn_float32", 2, 4, "interleaved"),
)
OTHER_MODELS = (
    *("mlp", "cnn", "cnn_float32", "lstm", "gru", "two_branches", "conditional", "sparse_embedding", "added_loss"),
    *("frozen_layers", "custom_gradient", "mlp_adam_float32", "clipped_gradients"),
)
OTHERS = [Setting(model, partitions, 4, "interleaved") for model in OTHER_MODELS for partitions in (2, 4)]


def launched_case(setting: Setting) -> LaunchedCase:
    """The case that trains a setting, with graphs as they are written."""
    model, partitions, microbatches, schedule = setting
    config = {"partitions": partitions, "microbatches": microbatches, "pipeline": schedule, "seed": 1}
    name = f"{model}-P{partitions}-M{microbatches}-{schedule}-as-written"
    return LaunchedCase(partitions, CASES, Case(name, "train", {"model": model, "as_written": True}, config))


def cases() -> Iterator[object]:
    for setting in dict.fromkeys([*BFLOAT16, *OTHERS]):
        marks = [] if setting in BY_DEFAULT else [pytest.mark.full]
        case = launched_case(setting)
        yield pytest.param(setting, case, id=case.case.name, marks=marks)


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """What one process gives of the settings that this session selected, with graphs as they are written."""
    settings = [i.callspec.params["setting"] for i in request.session.items if i.path == request.path]  # type: ignore[attr-defined]
    wanted = sorted({(setting.model, setting.microbatches) for setting in settings})
    started = References(ZOO, tmp_path_factory.mktemp("references"), wanted, as_written=True)
    yield started
    started.end()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("setting", "launched"), list(cases()))
def test_split_training_gives_the_bits_of_one_process(
    setting: Setting, references: References, case_result: CaseResult
) -> None:
    plain = references.of(setting.model, setting.microbatches)
    ranks = case_result.values()
    found = {int(position): value for rank in ranks for position, value in rank["variables"].items()}
    assert len(found) == sum(len(rank["variables"]) for rank in ranks) == len(plain["names"])
    differ = [str(plain["names"][i]) for i, v in sorted(found.items()) if v.tobytes() != plain[f"final_{i}"].tobytes()]
    assert differ == []
    for rank in ranks:
        for number, values in enumerate(rank["predictions"]):
            assert np.array_equal(values, plain[f"predictions_{number}"])
        # A mean over microbatches, which NumPy and TensorFlow may add in another order.
        np.testing.assert_allclose(rank["losses"], plain["losses"], rtol=4 * np.finfo(plain["losses"].dtype).eps)

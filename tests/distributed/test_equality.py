"""Training split over processes gives what one plain Keras process gives.

Every model of the zoo is trained for six steps with P partitions, M microbatches and both
schedules, and its losses, weights and predictions are compared with a process that never imports
smp_tf. The MLP and the GPT run with all settings; every other model runs with four, one per P,
chosen such that each model meets each P, each M and each schedule, and all models together meet
every combination of two. The settings left out run with `--full`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import ONE_THREAD, ROOT, Case, CaseResult
from tests.distributed.result_table import ResultTable, Row

PARTITIONS, MICROBATCHES = (1, 2, 3, 4), (1, 2, 4, 8)
SCHEDULES = ("simple", "interleaved")
WHOLE_GRID = ("mlp", "gpt")
# They take half of the time of all, and a fifth of that to predict.
LARGEST = ("resnet50", "mobilenet_v2")
# Kept as text, so that collecting the tests does not import TensorFlow; checked below.
MODELS = (
    *WHOLE_GRID,
    *("cnn", "cnn_float32", "unet", "lstm", "gru", "layer_called_twice", "two_branches"),
    *("resnet50", "mobilenet_v2", "mixed_bfloat16", "mlp_adam_float32", "conditional"),
    *("sparse_embedding", "added_loss", "frozen_layers", "custom_gradient", "ragged_batch"),
    "clipped_gradients",
)
CASES = "tests.distributed.cases.equality"
# What the two largest need for tracing on four processes that share two cores.
DEADLINE = 240.0


class Setting(NamedTuple):
    """How a model is trained."""

    model: str
    partitions: int
    microbatches: int
    schedule: str


def settings_of(model: str) -> list[Setting]:
    """The settings of a model that run by default, first, and then the others."""
    grid = [Setting(model, *rest) for rest in itertools.product(PARTITIONS, MICROBATCHES, SCHEDULES)]
    return sorted(grid, key=lambda setting: not by_default(setting))


def by_default(setting: Setting) -> bool:
    """Whether a setting runs without `--full`."""
    if setting.model in WHOLE_GRID:
        return True
    # A Latin square over P and M, turned by one from model to model; the schedule alternates.
    row, column = PARTITIONS.index(setting.partitions), MODELS.index(setting.model)
    return (
        setting.microbatches == MICROBATCHES[(row + column) % 4]
        and setting.schedule == SCHEDULES[(row + column // 4) % 2]
    )


def is_eager(setting: Setting) -> bool:
    """Whether the step is called eagerly: in one half of the settings, and within a tf.function in the other.

    A checkerboard over P, M and the schedule. (TensorFlow traces twice what makes variables within a tf.function.)
    """
    axes = (PARTITIONS.index(setting.partitions), MICROBATCHES.index(setting.microbatches))
    return (sum(axes) + SCHEDULES.index(setting.schedule)) % 2 == 1


def launched_case(setting: Setting, optimize: str = "memory") -> LaunchedCase:
    """The case that trains a setting; cases with the same P share their processes."""
    config = {
        "partitions": setting.partitions,
        "microbatches": setting.microbatches,
        "pipeline": setting.schedule,
        "optimize": optimize,
        "seed": 1,
    }
    model, partitions, microbatches, schedule = setting
    name = f"{model}-P{partitions}-M{microbatches}-{schedule}" + "-speed" * (optimize == "speed")
    # A step without backward runs the same tasks under every schedule.
    predicts = partitions == max(PARTITIONS) if model in LARGEST else model not in WHOLE_GRID or schedule == "simple"
    arguments = {"model": setting.model, "eager": is_eager(setting), "predicts": predicts}
    case = Case(name, "train", arguments, config)
    return LaunchedCase(setting.partitions, CASES, case, deadline=DEADLINE)


def grid() -> Iterator[object]:
    for model in MODELS:
        for setting in settings_of(model):
            marks = [] if by_default(setting) else [pytest.mark.full]
            case = launched_case(setting)
            yield pytest.param(setting, case, id=case.case.name, marks=marks)


class References:
    """What plain Keras gives, computed once per session by a process beside the first launches.

    Args:
        folder: where the process writes to.
        wanted: models and numbers of microbatches.
    """

    def __init__(self, folder: Path, wanted: list[tuple[str, int]]) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "tests.distributed.reference", str(folder), json.dumps(wanted)]
        environment = {
            **os.environ,
            **ONE_THREAD,
            "TF_USE_LEGACY_KERAS": "1",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        self._process = subprocess.Popen(command, env=environment, cwd=ROOT)

    def of(self, model: str, microbatches: int) -> dict[str, np.ndarray]:
        """Returns the arrays of one reference run."""
        assert self._process.wait(timeout=1800) == 0, "the process that trains with plain Keras failed"
        with np.load(self._folder / f"{model}-{microbatches}.npz") as arrays:
            return dict(arrays)

    def end(self) -> None:
        """Ends the process, when nobody waits for it any more."""
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """The references of all settings that this session selected."""
    wanted = {
        (spec.params["setting"].model, spec.params["setting"].microbatches)
        for item in request.session.items
        if (spec := getattr(item, "callspec", None)) and isinstance(spec.params.get("setting"), Setting)
    }
    started = References(tmp_path_factory.mktemp("references"), sorted(wanted))
    yield started
    started.end()


def relative(difference: float, size: float, floor: float) -> float:
    """A difference relative to a size, of which `floor` is taken for rounding of zero."""
    return max(0.0, difference - floor) / size if size else max(0.0, difference - floor)


@dataclass
class Comparison:
    """How the ranks of a run differ from plain Keras.

    Args:
        wrong: what is beyond the tolerances, in words.
        losses, weights: the largest relative deviations; None where they were not compared.
    """

    wrong: list[str] = field(default_factory=list)
    losses: float | None = None
    weights: float | None = None

    @property
    def row(self) -> Row:
        """The same as an entry of the table of results."""
        return Row(self.losses, self.weights, not self.wrong)


def compare(setting: Setting, ranks: list[dict], reference: dict[str, np.ndarray]) -> Comparison:
    """Compares losses, predictions, and the weights put together from all ranks."""
    from tests.distributed.models import MODELS as ZOO
    from tests.distributed.models import STEPS

    entry = ZOO[setting.model]
    tolerance = entry.loose or {"float64": 1e-9, "float32": 1e-5}[entry.floatx]
    found = Comparison(losses=0.0)
    for index, rank in enumerate(ranks):
        losses = np.abs(rank["losses"] - reference["losses"]) / np.abs(reference["losses"])
        found.losses = max(found.losses, float(losses.max()))
        if not losses.max() <= tolerance:
            found.wrong.append(f"losses of rank {index}: {rank['losses']}, plain Keras {reference['losses']}")
        if rank["iterations"] != STEPS:
            found.wrong.append(f"optimizer.iterations of rank {index} is {rank['iterations']}")
        for number, values in enumerate(rank["predictions"]):
            plain = reference[f"predictions_{number}"]
            size = np.linalg.norm(plain)
            if not np.linalg.norm(values - plain) <= 10 * tolerance * size:
                found.wrong.append(f"predictions {number} of rank {index} differ")
    if not found.wrong:
        compare_weights(found, ranks, reference, tolerance, entry)
    return found


def compare_weights(found: Comparison, ranks: list[dict], reference: dict, tolerance: float, entry) -> None:
    """Compares the weights, put together from all ranks, with the reference's."""
    names = [str(name) for name in reference["names"]]
    owners: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks):
        for position in rank["variables"]:
            owners.setdefault(int(position), []).append(index)
    found.wrong += [
        f"rank {i} has {r['count']} variables, not {len(names)}"
        for i, r in enumerate(ranks)
        if r["count"] != len(names)
    ]
    for position, name in enumerate(names):
        if len(owners.get(position, [])) != 1:
            found.wrong.append(f"{name} is stored by ranks {owners.get(position, [])}, not by one")
    if found.wrong:
        return
    found.weights = 0.0
    square_difference = square_size = 0.0
    for position, name in enumerate(names):
        value = ranks[owners[position][0]]["variables"][str(position)].astype(np.float64)
        final = reference[f"final_{position}"].astype(np.float64)
        initial = reference[f"initial_{position}"].astype(np.float64)
        difference = np.linalg.norm(value - final)
        square_difference += difference**2
        square_size += np.linalg.norm(final) ** 2
        if entry.floatx == "float64":
            # Rounding of the values themselves, and of a gradient that is zero in truth.
            floor = 1e-12 * max(1.0, np.linalg.norm(final))
            error = relative(difference, np.linalg.norm(final - initial), floor)
            found.weights = max(found.weights, error)
            if not error <= tolerance:
                found.wrong.append(f"the change of {name} {final.shape} is off by {error:.2e}")
    if entry.floatx == "float32" and entry.weights_compared:
        found.weights = float(np.sqrt(square_difference / square_size))
        if not found.weights <= tolerance:
            found.wrong.append(f"the weights are off by {found.weights:.2e} of the model's norm")
    elif entry.floatx == "float32":
        found.weights = None


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[ResultTable]:
    """The table of what was compared, written when all was where `--results` asks for it."""
    table = ResultTable(request.config.getoption("--results"))
    yield table
    table.write(MODELS, PARTITIONS)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("setting", "launched"), list(grid()))
def test_split_training_equals_one_process(
    setting: Setting, references: References, case_result: CaseResult, results: ResultTable
) -> None:
    found = Comparison(["the run did not come to its end"])
    try:
        found = compare(setting, case_result.values(), references.of(setting.model, setting.microbatches))
    finally:
        results.add(setting.model, setting.partitions, found.row)
    assert not found.wrong, "\n".join([f"{setting}:", *found.wrong])
    assert case_result.left_behind == []


BY_TIME = (
    *(Setting("gpt", 2, 4, "interleaved"), Setting("layer_called_twice", 2, 2, "simple")),
    *(Setting("gpt", 3, 4, "simple"), Setting("unet", 3, 2, "interleaved"), Setting("two_branches", 4, 2, "simple")),
)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("setting", "launched"), [(s, launched_case(s, optimize="speed")) for s in BY_TIME])
def test_stages_balanced_by_time_give_the_same(
    setting: Setting, references: References, case_result: CaseResult
) -> None:
    reference = references.of(setting.model, setting.microbatches)
    assert not compare(setting, case_result.values(), reference).wrong


def test_the_default_settings_cover_all_pairs() -> None:
    settings = [s for model in MODELS for s in settings_of(model) if by_default(s)]
    axes = {"model": MODELS, "partitions": PARTITIONS, "microbatches": MICROBATCHES}
    axes["schedule"] = SCHEDULES
    for first, second in itertools.combinations(axes, 2):
        seen = {(getattr(s, first), getattr(s, second)) for s in settings}
        assert seen == set(itertools.product(axes[first], axes[second])), (first, second)
    assert all(len([s for s in settings if s.model == model]) >= 4 for model in MODELS)
    for axis, values in axes.items():
        seen = {(getattr(s, axis), is_eager(s)) for s in settings}
        assert seen == set(itertools.product(values, (False, True))), axis


def test_every_model_of_the_zoo_is_trained() -> None:
    from tests.distributed.models import MODELS as ZOO

    assert set(ZOO) == {*MODELS, "dropout"}

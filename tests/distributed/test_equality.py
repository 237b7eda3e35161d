"""Training split over processes gives what one plain Keras process gives.

Every model of the zoo is trained for six steps with P partitions, M microbatches and both
schedules, and its losses and weights are compared with a process that never imports smp_tf; its
predictions in one setting or more. The MLP runs with all settings of two partitions and with all
of one microbatch. Besides it runs with four settings, one per P, as every other model does. They are
chosen such that each model meets each P, each M and each schedule, and all models together meet
every combination of two. Of the largest one runs, on two partitions. The settings left out run with
`--full`, and so do four settings of each of a few models more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.distributed.comparison import Comparison, References, Setting, compare
from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult
from tests.distributed.result_table import ResultTable

if TYPE_CHECKING:
    from tests.distributed.models import ZooModel

PARTITIONS, MICROBATCHES = (1, 2, 3, 4), (1, 2, 4, 8)
SCHEDULES = ("simple", "interleaved")
# Of these the table of all comparisons has the whole grid; by default the first one runs it.
WHOLE_GRID = ("mlp", "gpt")
# They take half of the time of all: by default one trains, on two partitions, and predicts nothing. What it has in its
# graph (convolutions, depthwise ones, batch normalisation, sums of branches), the others have, too.
LARGEST = {"resnet50": (), "mobilenet_v2": (2,), "efficientnet_b0": ()}
# Another cell in the loops that `lstm` has: with --full only, in the whole grid.
LIKE_OTHERS = ("gru",)
# Run with --full only: a third large one, and what differs from others in its dtype, optimizer or clipping alone.
ONLY_FULL = ("efficientnet_b0", "cnn_float32", "mlp_adam_float32", "clipped_gradients")
# Of these, so that float32 and its tolerances are in every run, one setting each.
FLOAT32 = {"cnn_float32": 4, "mlp_adam_float32": 2}
# Kept as text, so that collecting the tests does not import TensorFlow; checked below.
MODELS = (
    *WHOLE_GRID,
    *("cnn", "unet", "lstm", "gru", "layer_called_twice", "two_branches", "resnet50", "mobilenet_v2"),
    *("mixed_bfloat16", "conditional", "sparse_embedding", "added_loss", "frozen_layers", "custom_gradient"),
    *("ragged_batch", *ONLY_FULL),
)
CASES = "tests.distributed.cases.equality"
ZOO = "tests.distributed.models"
# What the two largest need for tracing on four processes that share two cores.
DEADLINE = 240.0


def settings_of(model: str) -> list[Setting]:
    """The settings of a model that run by default, first, and then the others."""
    grid = [Setting(model, *rest) for rest in itertools.product(PARTITIONS, MICROBATCHES, SCHEDULES)]
    if model in ONLY_FULL:
        return [setting for setting in grid if one_of_four(setting)]
    return sorted(grid, key=lambda setting: not by_default(setting))


def by_default(setting: Setting) -> bool:
    """Whether a setting runs without `--full`."""
    if setting.model in LIKE_OTHERS:
        return False
    if setting.model in ONLY_FULL:
        return FLOAT32.get(setting.model) == setting.partitions and one_of_four(setting)
    if setting.model == WHOLE_GRID[0] and (setting.partitions == 2 or setting.microbatches == 1):
        return True
    return one_of_four(setting) and setting.partitions in LARGEST.get(setting.model, PARTITIONS)


def one_of_four(setting: Setting) -> bool:
    """Whether a setting is among the four of its model, one per P."""
    # A Latin square over P and M, turned by one from model to model; the schedule alternates.
    row, column = PARTITIONS.index(setting.partitions), MODELS.index(setting.model)
    return (
        setting.microbatches == MICROBATCHES[(row + column) % 4]
        and setting.schedule == SCHEDULES[(row + column // 4) % 2]
    )


def is_eager(setting: Setting) -> bool:
    """Whether the step is called eagerly: in most settings, the largest models always; on one P in a tf.function."""
    if setting.model in LARGEST or setting.model not in MODELS:
        return True
    row, column = PARTITIONS.index(setting.partitions), MODELS.index(setting.model)
    if setting.model == WHOLE_GRID[0] and setting.schedule in SCHEDULES:
        return (row + MICROBATCHES.index(setting.microbatches) + SCHEDULES.index(setting.schedule)) % 4 != 3
    return (row + column) % 4 != 3


def predicts(setting: Setting) -> bool:
    """Whether predictions are compared, too: a step without backward runs the same tasks under every schedule."""
    of_all = setting.schedule == "simple" and setting.microbatches == 2
    if setting.model == WHOLE_GRID[0]:
        return of_all
    if setting.model in LARGEST:
        return setting.partitions == 2 and not by_default(setting)
    return of_all or setting.partitions == max(PARTITIONS)


def launched_case(setting: Setting, **more: object) -> LaunchedCase:
    """The case that trains a setting, with more keys of the configuration; cases with the same P share processes."""
    config: dict[str, object] = {
        "partitions": setting.partitions,
        "microbatches": setting.microbatches,
        "pipeline": setting.schedule,
        "seed": 1,
        **more,
    }
    model, partitions, microbatches, schedule = setting
    name = "-".join([f"{model}-P{partitions}-M{microbatches}-{schedule}", *(f"{key}={more[key]}" for key in more)])
    arguments = {"model": setting.model, "eager": is_eager(setting), "predicts": predicts(setting)}
    case = Case(name, "train", arguments, config)
    return LaunchedCase(setting.partitions, CASES, case, deadline=DEADLINE)


def grid() -> Iterator[object]:
    for model in MODELS:
        for setting in settings_of(model):
            marks = [] if by_default(setting) else [pytest.mark.full]
            case = launched_case(setting)
            yield pytest.param(setting, case, id=case.case.name, marks=marks)


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """The references of all settings that this session selected."""
    wanted = {
        (spec.params["setting"].model, spec.params["setting"].microbatches)
        for item in request.session.items
        if item.path == request.path and (spec := getattr(item, "callspec", None)) and "setting" in spec.params
    }
    started = References(ZOO, tmp_path_factory.mktemp("references"), sorted(wanted))
    yield started
    started.end()


def of_zoo(model: str) -> ZooModel:
    """The entry of the zoo."""
    from tests.distributed.models import MODELS as ZOO_MODELS

    return ZOO_MODELS[model]


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
        found = compare(of_zoo(setting.model), case_result.values(), references.of(setting.model, setting.microbatches))
    finally:
        results.add(setting.model, setting.partitions, found.row)
    assert not found.wrong, "\n".join([f"{setting}:", *found.wrong])
    assert case_result.left_behind == []


BY_TIME = (Setting("gpt", 3, 4, "simple"), Setting("layer_called_twice", 2, 2, "simple"))


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("setting", "launched"),
    [pytest.param(s, launched_case(s, optimize="speed"), marks=pytest.mark.full) for s in BY_TIME],
)
def test_stages_balanced_by_time_give_the_same(
    setting: Setting, references: References, case_result: CaseResult
) -> None:
    reference = references.of(setting.model, setting.microbatches)
    assert not compare(of_zoo(setting.model), case_result.values(), reference).wrong


#: Dropout is in test_dropout.py.
MADE_AGAIN = (
    *(
        Setting("gpt", 2, 4, "simple"),
        Setting("cnn", 1, 1, "interleaved"),
        Setting("ragged_batch", 3, 4, "interleaved"),
    ),
    *(Setting("lstm", 2, 4, "simple"), Setting("mixed_bfloat16", 4, 8, "interleaved"), Setting("gpt", 2, 4, "zb_v")),
    *(Setting("resnet50", 2, 4, "interleaved"), Setting("conditional", 2, 2, "zb_h1")),
)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("setting", "launched"),
    [
        pytest.param(s, launched_case(s, recompute=True), marks=[] if s in MADE_AGAIN[:2] else pytest.mark.full)
        for s in MADE_AGAIN
    ],
)
def test_activations_that_are_made_again_give_the_same(
    setting: Setting, references: References, case_result: CaseResult
) -> None:
    reference = references.of(setting.model, setting.microbatches)
    assert not compare(of_zoo(setting.model), case_result.values(), reference).wrong
    # A model on one partition has no plan to show.
    assert ("recompute: backward makes again" in case_result.output[0]) == (setting.partitions > 1)


OTHER_SCHEDULES = (
    *(Setting("gpt", 2, 4, "zb_h1"), Setting("mlp", 2, 4, "auto")),
    # Several chunks per rank.
    *(Setting("gpt", 2, 4, "zb_v"), Setting("unet", 2, 4, "interleaved_1f1b"), Setting("ragged_batch", 2, 2, "v_half")),
    Setting("mlp", 2, 2, "v_min"),
)
MORE_SCHEDULES = (
    *(Setting("unet", 3, 2, "zb_h1"), Setting("ragged_batch", 2, 4, "zb_h1"), Setting("mixed_bfloat16", 3, 8, "zb_h1")),
    *(
        Setting("gru", 4, 4, "zb_h1"),
        Setting("gpt", 4, 8, "interleaved_1f1b"),
        Setting("resnet50", 2, 4, "zb_v"),
        Setting("lstm", 2, 4, "zb_v"),
        Setting("gru", 2, 2, "v_min"),
        Setting("cnn", 3, 4, "zb_v"),
    ),
)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("setting", "launched"),
    [
        *((setting, launched_case(setting)) for setting in OTHER_SCHEDULES),
        *(pytest.param(setting, launched_case(setting), marks=pytest.mark.full) for setting in MORE_SCHEDULES),
    ],
)
def test_other_schedules_give_the_same(setting: Setting, references: References, case_result: CaseResult) -> None:
    reference = references.of(setting.model, setting.microbatches)
    assert not compare(of_zoo(setting.model), case_result.values(), reference).wrong


#: One rank cuts its backward in two, and the other does not; and one rank has both ends of the model.
FROM_A_FILE = (
    Setting("gpt", 2, 2, "tests/distributed/one_rank_cuts.txt"),
    Setting("gpt", 2, 2, "tests/distributed/both_ends.txt"),
)


@pytest.mark.parametrize(
    ("setting", "launched"),
    [
        pytest.param(s, launched_case(s), marks=[] if "both_ends" in s.schedule else pytest.mark.full)
        for s in FROM_A_FILE
    ],
)
def test_a_schedule_from_a_file_gives_the_same(
    setting: Setting, references: References, case_result: CaseResult
) -> None:
    assert not compare(of_zoo("gpt"), case_result.values(), references.of("gpt", 2)).wrong


NOT_CONTIGUOUS = (Setting("gpt", 2, 4, "interleaved"), Setting("two_branches", 3, 2, "simple"))


@pytest.mark.parametrize(
    ("setting", "launched"),
    [pytest.param(s, launched_case(s, contiguous=False), marks=pytest.mark.full) for s in NOT_CONTIGUOUS],
)
def test_a_rank_with_both_ends_of_the_model_gives_the_same(
    setting: Setting, references: References, case_result: CaseResult
) -> None:
    reference = references.of(setting.model, setting.microbatches)
    assert not compare(of_zoo(setting.model), case_result.values(), reference).wrong


SIDE_BY_SIDE = Setting("side_by_side", 3, 2, "interleaved")


@pytest.mark.parametrize(("setting", "launched"), [(SIDE_BY_SIDE, launched_case(SIDE_BY_SIDE))])
def test_branches_placed_beside_each_other_give_the_same(
    setting: Setting, references: References, case_result: CaseResult
) -> None:
    found = case_result.values()
    assert not compare(of_zoo(setting.model), found, references.of(setting.model, setting.microbatches)).wrong
    # The second branch is not between the first and the third.
    owner = {int(position): rank for rank, values in enumerate(found) for position in values["variables"]}
    assert len({owner[0], owner[4]}) == 2
    assert owner[2] == owner[6] == 2


#: Loops of a script's own, in a tf.function, so that XLA may put together all that a rank does. That these flags make
#: it do so, test_fit shows.
CLUSTERS = (("TF_XLA_FLAGS", "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"),)
CLUSTERED = (
    *(Setting("gpt", 2, 4, "zb_h1"), Setting("clipped_gradients", 2, 4, "interleaved")),
    *(
        Setting(model, 2, 4, "interleaved")
        for model in ("gpt", "cnn", "lstm", "two_branches", "conditional", "sparse_embedding", "custom_gradient")
    ),
    *(Setting("mlp", 4, 8, "interleaved"), Setting("gpt", 2, 4, "zb_v"), Setting("ragged_batch", 2, 4, "interleaved")),
)


def clustered_case(setting: Setting) -> LaunchedCase:
    case = launched_case(setting).case
    case = replace(case, name=f"{case.name}-clustered", arguments={**case.arguments, "eager": False})
    return LaunchedCase(setting.partitions, CASES, case, environment=CLUSTERS, deadline=DEADLINE)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("setting", "launched"),
    [pytest.param(s, clustered_case(s), marks=[] if s in CLUSTERED[:2] else pytest.mark.full) for s in CLUSTERED],
)
def test_xlas_auto_clustering_gives_the_same(setting: Setting, references: References, case_result: CaseResult) -> None:
    reference = references.of(setting.model, setting.microbatches)
    assert not compare(of_zoo(setting.model), case_result.values(), reference).wrong


def test_the_default_settings_cover_all_pairs() -> None:
    models = [model for model in MODELS if model not in (*ONLY_FULL, *LIKE_OTHERS, *LARGEST)]
    settings = [s for model in models for s in settings_of(model) if by_default(s)]
    axes = {"model": models, "partitions": PARTITIONS, "microbatches": MICROBATCHES}
    axes["schedule"] = SCHEDULES
    for first, second in itertools.combinations(axes, 2):
        seen = {(getattr(s, first), getattr(s, second)) for s in settings}
        assert seen == set(itertools.product(axes[first], axes[second])), (first, second)
    assert all(len([s for s in settings if s.model == model]) >= 4 for model in models)
    of_largest = {model: [s.partitions for s in settings_of(model) if by_default(s)] for model in LARGEST}
    assert of_largest == {"resnet50": [], "mobilenet_v2": [2], "efficientnet_b0": []}
    for axis, values in axes.items():
        seen = {(getattr(s, axis), is_eager(s)) for s in settings}
        assert seen == set(itertools.product(values, (False, True))), axis


def test_every_model_of_the_zoo_is_trained() -> None:
    from tests.distributed.models import MODELS as ZOO

    assert set(ZOO) == {*MODELS, "side_by_side", "dropout"}

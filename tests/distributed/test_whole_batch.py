"""Over stages, too, metrics and what a `train_step` makes of its gradients are those of plain Keras."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_tf.pipeline.programs.kinds import SUM
from smp_tf.pipeline.task import Task
from smp_tf.recording import timeline_file
from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult, launch
from tests.full_only import params

CASES = "tests.distributed.cases.whole_batch"
STAGES = {"partitions": 2, "microbatches": 4, "seed": 1}
SCHEDULES = ("simple", "interleaved", "zb_h1")
#: Of `tests/smp_tf/whole_batch/own_optimizers.py`.
OPTIMIZER_NAMES = ("Scaling", "Averaging", "Sorting", "Clipping")


def use(name: str, pipeline: str = "interleaved") -> LaunchedCase:
    return LaunchedCase(
        2, CASES, Case(f"{name} {pipeline}", "gradients", {"use": name}, {**STAGES, "pipeline": pipeline})
    )


#: By name: what is launched.
GRADIENTS = [
    use("in_two_rounds"),
    use("of_all_in_a_row"),
    *(use("clipped_and_logged", pipeline) for pipeline in SCHEDULES),
    use("adaptive"),
    LaunchedCase(3, CASES, Case("over three", "gradients", {"use": "in_two_rounds"}, {**STAGES, "partitions": 3})),
]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params(GRADIENTS, GRADIENTS[1:]))
def test_what_is_made_of_gradients_is_made_of_those_of_all_stages(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {True}


REPLICAS = {"partitions": 1, "seed": 1}


def over_replicas(name: str, function: str, arguments: dict[str, str], microbatches: int) -> LaunchedCase:
    """A case on two replicas of one partition."""
    return LaunchedCase(2, CASES, Case(name, function, arguments, {**REPLICAS, "microbatches": microbatches}))


def over_both(name: str, function: str, arguments: dict[str, str], **more: object) -> LaunchedCase:
    """A case on two replicas of two partitions."""
    return LaunchedCase(4, CASES, Case(name, function, arguments, {**STAGES, **more}))


OF_REPLICAS = [
    over_replicas("replicas, norm", "gradients", {"use": "clipped_and_logged"}, 3),
    over_replicas("replicas, all metrics", "history_over_replicas", {}, 3),
    over_replicas("replicas, the last batches cannot be joined", "padded", {"pads": "later"}, 2),
    over_replicas("replicas, one microbatch", "gradients", {"use": "scaled_by_the_loss"}, 1),
    over_replicas("replicas, norm, unlike", "gradients", {"use": "clipped_and_logged", "pads": "unlike"}, 2),
    *(over_replicas(f"replicas, {use}", "gradients", {"use": use}, 2) for use in ("adaptive", "of_all_in_a_row")),
    over_replicas("replicas, all metrics, one microbatch", "history_over_replicas", {}, 1),
    over_both("both, norm", "gradients", {"use": "clipped_and_logged"}),
    over_both("both, slots shared", "gradients", {"use": "in_two_rounds"}, shard_optimizer_state=True),
    over_both("both, all metrics", "history_over_replicas", {}),
]


LOSSES_OF_REPLICAS = [
    *(over_replicas(f"replicas, {loss}", "losses", {"loss": loss}, 3) for loss in ("of_few", "in_batch_softmax")),
    *(
        over_replicas(f"replicas, {loss}", "losses", {"loss": loss}, 3)
        for loss in ("total", "over_sixteen", "of_positives", "detection", "weighted_sum", "dice")
    ),
    over_replicas("replicas, one microbatch, of_positives", "losses", {"loss": "of_positives"}, 1),
    over_both("both, of_few", "losses", {"loss": "of_few"}),
    over_both("both, in_batch_softmax", "losses", {"loss": "in_batch_softmax"}),
]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params(LOSSES_OF_REPLICAS, LOSSES_OF_REPLICAS[1:]))
def test_losses_count_the_samples_of_all_replicas(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {True}


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params(OF_REPLICAS, OF_REPLICAS[3:]))
def test_what_is_computed_once_is_computed_of_the_batches_of_all_replicas(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {True}


#: By name of the model: what is launched, and what is said of the sizes of microbatches.
MIXING = {
    "stages_mix": (
        LaunchedCase(2, CASES, Case("stages mix", "mixing", {"name": "stages_mix"}, STAGES)),
        "2 to 3 of 10",
    ),
    "replicas_mix": (
        over_replicas("replicas mix", "mixing", {"name": "replicas_mix"}, 2),
        "5 of 20 samples over 2 replicas",
    ),
    "replicas_mix_whole": (
        over_replicas("replicas mix, one microbatch", "mixing", {"name": "replicas_mix_whole"}, 1),
        "10 of 20 samples over 2 replicas",
    ),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("launched", "name", "sizes"), [(launched, name, sizes) for name, (launched, sizes) in MIXING.items()]
)
def test_a_model_that_mixes_samples_is_told_of_by_rank_0_alone(case_result: CaseResult, name: str, sizes: str) -> None:
    told = [[line for line in output.splitlines() if "mixes samples" in line] for output in case_result.output]
    [[text], *others] = told
    assert f"train_step of model '{name}': layer '{name}/centred' (Centred) mixes samples: op " in text
    assert f"Every microbatch is computed by itself, here {sizes}" in text
    assert not any(others)


@pytest.mark.distributed
def test_what_stages_tell_each_other_of_gradients_is_in_the_list_of_tasks(tmp_path: Path) -> None:
    case = Case("recorded", "recorded", {"use": "in_two_rounds", "folder": str(tmp_path)}, STAGES)
    assert launch(2, CASES, [case])["recorded"].values() == [True, True]
    for stage, record in enumerate(timeline_file.read([tmp_path])):
        twice = [Task(SUM, stage), Task(SUM, stage, bucket=1)]
        for planned in record.programs.values():
            assert [task for task in planned.planned.ranks[stage] if task.kind is SUM] == twice
        assert len(record.steps) == 6
        for step in record.steps:
            assert [run.task for run in step.tasks if run.task.kind is SUM] == twice


#: What is launched.
LOSSES = [
    LaunchedCase(2, CASES, Case(loss, "losses", {"loss": loss}, STAGES))
    for loss in ("of_few", "in_batch_softmax", "total", "dice")
]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params(LOSSES, LOSSES[2:]))
def test_losses_count_samples_as_in_the_whole_batch(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {True}


#: What is launched.
OPTIMIZERS = [LaunchedCase(2, CASES, Case(name, "optimizer", {"name": name}, STAGES)) for name in OPTIMIZER_NAMES]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params(OPTIMIZERS, [OPTIMIZERS[0], *OPTIMIZERS[2:]]))
def test_an_optimizers_own_code_sees_the_gradients_of_all_stages(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {True}


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [LaunchedCase(2, CASES, Case("metrics", "history", {}, STAGES))])
def test_metrics_are_those_of_the_whole_batch_on_every_rank(case_result: CaseResult) -> None:
    assert set(case_result.values()) == {True}


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize(
    "launched",
    [
        over_replicas(f"replicas, many sizes, {loss}", "losses_of_many_sizes", {"loss": loss}, 3)
        for loss in ("of_positives", "in_batch_softmax")
    ],
)
def test_a_loss_is_looked_at_once_for_all_sizes_but_the_first(case_result: CaseResult) -> None:
    assert list(case_result.values()) == [[True, 1], [True, 1]]

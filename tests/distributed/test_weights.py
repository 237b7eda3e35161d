"""Weights of a split model go to files and lists and come back, and no rank reads what it does not store."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult

CASES = "tests.distributed.cases.weights"


def launched(size: int, function: str, *marks: pytest.MarkDecorator, **arguments: object) -> object:
    """A case with two partitions: on two processes, or with a second replica on four."""
    case = Case("-".join([function, *map(str, arguments.values())]), function, arguments, {"partitions": 2})
    return pytest.param(LaunchedCase(size, CASES, case), id=f"{case.name}-2x{size // 2}", marks=marks)


def close(value: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.allclose(value, wanted, rtol=0, atol=1e-6))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "launched", [launched(2, "files", kind="subclass"), launched(4, "files", pytest.mark.full, kind="builder")]
)
def test_files_go_to_plain_keras_and_come_from_there(launched: LaunchedCase, case_result: CaseResult) -> None:
    ranks = case_result.values()
    ours, changed = ranks[0]["ours"], ranks[0]["changed"]
    assert not close(ours, changed)
    assert not close(ranks[0]["filled"], changed)
    for name, said in ranks[0]["plain"].items():
        assert close(said, ours), f"plain Keras with {name}"
    stored = 0
    for number, rank in enumerate(ranks):
        for name, said in (*rank["before"].items(), *rank["after"].items()):
            assert close(said, changed), f"rank {number} with {name}"
        for name, (before, after, local, of_all) in rank["read"].items():
            assert (before, after) == (local, local), f"rank {number} read foreign values of {name}"
            assert local < of_all
        stored += local
    assert stored == of_all * len(ranks) // 2


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [launched(2, "lists"), launched(4, "lists", pytest.mark.full)])
def test_lists_are_kept_put_back_gathered_and_set(launched: LaunchedCase, case_result: CaseResult) -> None:
    ranks = case_result.values()
    for rank in ranks:
        assert np.array_equal(rank["back"], rank["before"])
        assert np.array_equal(rank["whole"], rank["before"])
        assert not rank["zeros"].any()
        assert np.array_equal(rank["last"], rank["gathered"][-1])
        assert [value.shape for value in rank["gathered"]] == [
            (3, 4), (4,), (4,), (4,), (4,), (4,), (4, 5), (5,), (5, 2), (2,)
        ]  # fmt: skip
        assert rank["said"] == f"<ShardedWeights of 10 weights, {len(rank['here'])} of them on this rank>"
        assert rank["refused"][0] == "Model 'fun' has 10 weights. Received: a list of 9 weights."
        assert rank["refused"][1].startswith("Weight 9, 'head/bias:0', has shape (2,). Received: a value of shape (9,)")
        for one, other in zip(rank["gathered"], ranks[0]["gathered"], strict=True):
            assert np.array_equal(one, other)
    assert sorted(number for rank in ranks[:2] for number in rank["here"]) == list(range(10))


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [launched(2, "moved")])
def test_sharded_weights_move_to_a_model_that_is_cut_otherwise(launched: LaunchedCase, case_result: CaseResult) -> None:
    for rank in case_result.values():
        assert rank["owners"] == [[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]]
        assert not close(rank["before"], rank["wanted"])
        assert np.array_equal(rank["after"], rank["wanted"])


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [launched(2, "failing"), launched(4, "failing", pytest.mark.full)])
def test_a_failure_of_the_writing_rank_is_told_to_all_and_training_can_go_on(
    launched: LaunchedCase, case_result: CaseResult
) -> None:
    first, *others = case_result.values()
    assert first["said"] == "OSError: No space left on device"
    for rank in others:
        assert rank["said"] == (
            "StepError: Rank 0 failed at saving the weights of model 'fun': OSError: No space left on device"
        )
    for rank in (first, *others):
        assert (rank["left"], rank["refused"], rank["same"]) == ([], True, True)


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [launched(2, "pretrained")])
def test_pretrained_models_are_loaded_where_a_model_is_made(launched: LaunchedCase, case_result: CaseResult) -> None:
    ranks = case_result.values()
    for rank in ranks:
        for end, given in rank["given"].items():
            assert np.allclose(given, rank["wanted"], rtol=0, atol=1e-5), end
        for end in (".keras", ".h5"):
            before, after, local, of_all = rank["read"][end]
            assert (before, after) == (0, local)
            assert 0 < local < of_all
    assert [sum(rank["read"][".h5"][at] for rank in ranks) for at in (2, 3)] == [20, 40]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [launched(2, "unused"), launched(4, "unused", pytest.mark.full)])
def test_layers_that_the_training_does_not_use_are_placed_when_a_step_uses_them(
    launched: LaunchedCase, case_result: CaseResult
) -> None:
    """Bug: a head without a loss was on stage 0 for good, and the first predict after a training was refused."""
    ranks = case_result.values()
    predicted, weights, more = ranks[0]["plain"]
    for rank in ranks:
        before, after = ({name: rest for name, *rest in rank[when]} for when in ("before", "after"))
        assert before["early"] == [0, False]
        assert before["late"] == [1, False]
        assert before["main"] == after["main"] == [1, True]
        assert after["early"] == after["late"] == [1, True]
        assert all(map(close, rank["weights"], weights))
        assert all(map(close, rank["more"], more))
        for name, wanted in predicted.items():
            assert close(rank["predicted"][name], wanted), name
            assert close(rank["restored"][name], wanted), name
            assert close(ranks[0]["read"][name], wanted), name


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [launched(2, "used_by_all"), launched(4, "used_by_all", pytest.mark.full)])
def test_scripts_set_and_read_weights_as_in_plain_keras(launched: LaunchedCase, case_result: CaseResult) -> None:
    """Bug: what every rank set, or read, was refused where another rank stored it."""
    ranks = case_result.values()
    for number, rank in enumerate(ranks):
        for way in ("weights", "by layer", "by plain model", "one"):
            for found, wanted in zip(rank[way], ranks[0]["plain"], strict=True):
                assert close(found, wanted), f"{way} on rank {number}"
        assert close(rank["part"], ranks[0]["plain part"])
        assert "tf.keras.backend.get_value(variable), layer.get_weights() and model.get_weights() tell" in rank["read"]
        assert "Outside a tf.function every rank may assign the same value" in rank["graph"]
        assert "wrap it in smp.DistributedModel and use its predict" in rank["called"]
        for saving in ("alone", "alone, checkpoint"):
            assert "1 value on rank 0, nothing on rank 1, which stores it. Call assign, K.set_value" in rank[saving]
        assert "'head/bias': 1 value on rank 0, others on rank 1, which stores it" in rank["other"]

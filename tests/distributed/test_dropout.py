"""Random masks depend on the seed, the step, the microbatch and the replica, and on nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch
from tests.full_only import params

PARTITIONS = (1, 2, 3, 4)
#: Without --full a model is trained on one partition and on two.
TRAINED = (1, 2)
ONLY_FULL = [p for p in PARTITIONS if p not in TRAINED]


def config(partitions: int, seed: int = 1) -> dict[str, object]:
    return {"partitions": partitions, "microbatches": 4, "seed": seed}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[int, dict[str, CaseResult]]:
    """The dropout model trained twice on any number of partitions."""

    def cases(partitions: int) -> list[Case]:
        given = {"model": "dropout", "predicts": False}
        return [
            *(Case(name, "train", given, config(partitions)) for name in ("first", "again")),
            Case("made again", "train", given, {**config(partitions), "recompute": True, "pipeline": "simple"}),
        ]

    several = PARTITIONS if request.config.getoption("--full") else TRAINED
    # The largest first: the other processes then wait for the cases of `drawn`.
    return {p: launch(p, "tests.distributed.cases.equality", cases(p)) for p in reversed(several)}


@pytest.fixture(scope="module")
def drawn() -> dict[int, dict[str, CaseResult]]:
    """Masks by number of processes: on as many partitions, on two also with another seed, and in two replicas."""

    def cases(processes: int) -> list[Case]:
        made = [Case("first", "masks", {}, config(processes))]
        if processes == 2:
            made.append(Case("other", "masks", {}, config(2, seed=2)))
        if processes in (2, 4):
            made.append(Case("replicas", "masks", {}, {**config(processes // 2), "horovod": True}))
        return made

    return {p: launch(p, "tests.distributed.cases.dropout", cases(p)) for p in PARTITIONS}


def masks_of(result: CaseResult) -> np.ndarray:
    """Masks by step, layer and microbatch: every rank was given the same."""
    first, *others = (rank["masks"] for rank in result.values())
    for other in others:
        np.testing.assert_array_equal(other, first)
    return first


@pytest.mark.parametrize("partitions", params(PARTITIONS[1:], only_full=ONLY_FULL))
def test_training_with_dropout_is_the_same_on_any_number_of_partitions(
    trained: dict[int, dict[str, CaseResult]], partitions: int
) -> None:
    [alone] = trained[1]["first"].values()
    for rank in trained[partitions]["first"].values():
        np.testing.assert_allclose(rank["losses"], alone["losses"], rtol=1e-9)
        for position, value in rank["variables"].items():
            np.testing.assert_allclose(value, alone["variables"][position], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("partitions", params(PARTITIONS, only_full=ONLY_FULL))
def test_the_same_seed_gives_the_same_run_to_the_bit(
    trained: dict[int, dict[str, CaseResult]], partitions: int
) -> None:
    for first, again in zip(trained[partitions]["first"].values(), trained[partitions]["again"].values(), strict=True):
        np.testing.assert_array_equal(again["losses"], first["losses"])
        assert again["variables"].keys() == first["variables"].keys()
        for position, value in again["variables"].items():
            np.testing.assert_array_equal(value, first["variables"][position])


@pytest.mark.parametrize("partitions", params(PARTITIONS, only_full=ONLY_FULL))
def test_activations_that_are_made_again_have_the_same_masks(
    trained: dict[int, dict[str, CaseResult]], partitions: int
) -> None:
    [alone] = trained[1]["first"].values()
    for rank in trained[partitions]["made again"].values():
        np.testing.assert_allclose(rank["losses"], alone["losses"], rtol=1e-9)


def test_masks_differ_between_steps_layers_and_microbatches(
    drawn: dict[int, dict[str, CaseResult]],
) -> None:
    masks = masks_of(drawn[2]["first"])
    assert masks.shape == (2, 4, 4, 2, 6)
    flat = masks.reshape(32, -1)
    assert {0.0, 2.0} == set(np.unique(flat))
    for one, other in itertools.combinations(range(32), 2):
        assert (flat[one] != flat[other]).any(), (one, other)


@pytest.mark.parametrize("partitions", PARTITIONS[1:])
def test_masks_do_not_depend_on_the_number_of_partitions(
    drawn: dict[int, dict[str, CaseResult]], partitions: int
) -> None:
    np.testing.assert_array_equal(masks_of(drawn[partitions]["first"]), masks_of(drawn[1]["first"]))


def test_another_seed_draws_other_masks(drawn: dict[int, dict[str, CaseResult]]) -> None:
    first, other = (masks_of(drawn[2][name]) for name in ("first", "other"))
    assert (first != other).any()


@pytest.mark.parametrize("partitions", [1, 2])
def test_replicas_draw_different_masks_on_any_number_of_partitions(
    drawn: dict[int, dict[str, CaseResult]], partitions: int
) -> None:
    masks: dict[int, list[np.ndarray]] = {0: [], 1: []}
    for rank in drawn[2 * partitions]["replicas"].values():
        masks[rank["replica"]].append(rank["masks"])
    assert [len(of_replica) for of_replica in masks.values()] == [partitions] * 2
    assert (masks[0][0] != masks[1][0]).any()
    unsplit = [rank["masks"] for rank in drawn[2]["replicas"].values()]
    for replica, of_replica in masks.items():
        for found in of_replica:
            np.testing.assert_array_equal(found, unsplit[replica])

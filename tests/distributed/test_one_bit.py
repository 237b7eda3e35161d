"""Replicas that send one bit an element after a warm-up learn as those that send all, and stay equal."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch
from tests.full_only import params, selected

CASES = "tests.distributed.cases.one_bit"
STEPS, WARMUP = 50, 30
#: The optimizers of one bit, and what each is compared with: in one process, which sends nothing.
WHOLE = {"one-bit adam": "adam", "one-bit lamb": "one-bit lamb"}
ONLY_FULL = ("one-bit lamb",)


def config(**more: Any) -> dict[str, Any]:
    return {"partitions": 2, "microbatches": 2, "seed": 1, "gradient_compression": "1bit", **more}


def learned(names: Collection[str], **more: Any) -> Case:
    arguments = {"names": [*names], "steps": STEPS, "warmup": WARMUP}
    return Case("learned", "language_model", arguments, config(microbatches=1, **more))


def trained(request: pytest.FixtureRequest) -> dict[str, str]:
    """The optimizers that this session tries."""
    return {name: WHOLE[name] for name in selected(WHOLE, ONLY_FULL, request.config)}


def shares(**more: Any) -> Case:
    return Case("shares", "shares", {"warmup": 3}, config(**more))


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """One process with all samples."""
    names = [*trained(request).values()]
    never_frozen = ["lamb"] if "one-bit lamb" in names else []
    return launch(1, CASES, [learned([*names, *never_frozen], partitions=1), shares(partitions=1)])


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseResult]:
    """Two replicas; of two partitions with --full, and otherwise where checkpoints join what the stages have."""
    full = request.config.getoption("--full")
    partitions = 2 if full else 1
    listed = [
        learned(trained(request), partitions=partitions),
        shares(partitions=partitions),
        Case("refused", "refused", {}, config(partitions=partitions, microbatches=1)),
    ]
    fit = Case("fit", "fitted", {"folder": str(tmp_path_factory.mktemp("checkpoints"))}, config())
    # With --full as often as users have it: averages come one after the other. That takes twice the processor time.
    cycle = {"HOROVOD_CYCLE_TIME": "1"} if full else {}
    found = launch(2 * partitions, CASES, listed, environment=cycle)
    return found | launch(4, CASES, [fit], environment=cycle)


def replicas_of(case: CaseResult) -> list[tuple[Any, Any]]:
    """The two replicas of each stage."""
    by_place = {tuple(rank["place"]): rank for rank in case.values()}
    return [(by_place[stage, 0], by_place[stage, 1]) for stage in sorted({stage for stage, _ in by_place})]


def have_same_bits(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return {name: v.tobytes() for name, v in first.items()} == {name: v.tobytes() for name, v in second.items()} != {}


@pytest.mark.parametrize("name", params(WHOLE, ONLY_FULL))
def test_the_language_model_learns_as_with_whole_gradients(
    found: dict[str, CaseResult], whole: dict[str, CaseResult], name: str
) -> None:
    [alone] = whole["learned"].values()
    wanted = alone["trained"][WHOLE[name]]["losses"]
    losses = np.mean([rank["trained"][name]["losses"] for rank in found["learned"].values()], axis=0)
    assert losses[0] == pytest.approx(wanted[0], rel=1e-5)
    begin, end = losses[0], np.mean(losses[-15:])
    assert end < 0.8 * begin
    assert end < np.mean(losses[WARMUP - 15 : WARMUP])
    assert end < np.mean(wanted[-15:]) + 0.1


@pytest.mark.full
def test_one_bit_lamb_learns_as_one_whose_variance_never_freezes(
    found: dict[str, CaseResult], whole: dict[str, CaseResult]
) -> None:
    """It was compared with itself alone, whose variance freezes too."""
    [alone] = whole["learned"].values()
    wanted = alone["trained"]["lamb"]["losses"]
    assert alone["trained"]["one-bit lamb"]["losses"][:WARMUP] == pytest.approx(wanted[:WARMUP], rel=1e-5)
    losses = np.mean([rank["trained"]["one-bit lamb"]["losses"] for rank in found["learned"].values()], axis=0)
    assert np.mean(losses[-15:]) < np.mean(wanted[-15:]) + 0.1


@pytest.mark.parametrize("name", params(WHOLE, ONLY_FULL))
def test_the_warm_up_is_that_of_whole_gradients(
    found: dict[str, CaseResult], whole: dict[str, CaseResult], name: str
) -> None:
    [alone] = whole["learned"].values()
    wanted = alone["trained"][WHOLE[name]]["warm"]
    names = set()
    for rank in found["learned"].values():
        for weight, value in rank["trained"][name]["warm"].items():
            np.testing.assert_allclose(value, wanted[weight], rtol=1e-3, atol=1e-3, err_msg=weight)
            names.add(weight)
    assert names == wanted.keys()


@pytest.mark.parametrize("name", params(WHOLE, ONLY_FULL))
def test_replicas_have_the_same_bits(found: dict[str, CaseResult], name: str) -> None:
    for first, second in replicas_of(found["learned"]):
        here = first["trained"][name]
        assert have_same_bits(here["weights"], second["trained"][name]["weights"])
        assert all((here["weights"][weight] != value).any() for weight, value in here["warm"].items())
        assert here["iterations"] == STEPS


@pytest.mark.parametrize("name", params(WHOLE, ONLY_FULL))
def test_a_twenty_fifth_is_sent_after_the_warm_up(found: dict[str, CaseResult], name: str) -> None:
    """To the other replica go a half of what an alltoall is given and all of what is gathered; in a ring, as much.

    Of large weights it is less: here a bias of 64 elements is a block.
    """
    ranks = [rank for rank in found["learned"].values() if rank["place"][1] == 0]
    sent = [rank["trained"][name]["sent"] for rank in ranks]
    whole = sum(rank["stored"] for rank in ranks)
    assert sum(of["grouped_allreduce"] for of in sent) == whole
    assert sum(of["alltoall"] / 2 + of["allgather"] for of in sent) <= whole / 25


def test_what_the_optimizer_keeps_is_counted(found: dict[str, CaseResult], whole: dict[str, CaseResult]) -> None:
    # Slots per weight; over replicas errors beside them, of blocks that are not full.
    slots = {"adam": 2, "one-bit adam": 2, "one-bit lamb": 3, "lamb": 3}
    for rank in found["learned"].values():
        for name, of in rank["trained"].items():
            assert 1.5 <= of["held"] / rank["stored"] - slots[name] <= 2.1
    [alone] = whole["learned"].values()
    for name, of in alone["trained"].items():
        assert of["held"] == slots[name] * alone["stored"]


def test_replicas_with_shares_of_other_sizes(found: dict[str, CaseResult], whole: dict[str, CaseResult]) -> None:
    """They weigh by their samples, and trace for sizes of their own; some gradients are sparse."""
    [alone] = whole["shares"].values()
    for first, second in replicas_of(found["shares"]):
        for weight, value in first["warm"].items():
            np.testing.assert_allclose(value, alone["warm"][weight], rtol=1e-6, err_msg=weight)
        assert have_same_bits(first["weights"], second["weights"])
        assert not have_same_bits(first["weights"], first["warm"])


def test_fit_and_checkpoints(found: dict[str, CaseResult]) -> None:
    for first, second in replicas_of(found["fit"]):
        assert first["iterations"] == second["iterations"] == 8
        assert have_same_bits(first["weights"], second["weights"])
        assert have_same_bits(first["saved"], first["restored"])
        begin, goes_on, once_more = first["losses"]
        assert first["losses"] == second["losses"]
        assert begin > goes_on
        # Errors are not saved.
        assert once_more == pytest.approx(goes_on, rel=0.2)


def test_who_does_not_average_is_refused(found: dict[str, CaseResult]) -> None:
    for said in found["refused"].values():
        assert said["adam"].startswith(
            'With "gradient_compression": "1bit" gradients come out of a step as each replica'
        )
        assert "Adam does not, and was given that of" in said["legacy"]
        assert "smp.average_gradients (which smp.DistributedOptimizer calls) was given such" in said["average"]
        assert said["wrapped"] == said["average"]
        assert "LossScaleOptimizerV3 would decide on each by these alone" in said["scaled"]
        assert "jit_compile=True, and the optimizer averages them over the replicas" in said["compiled"]
        assert said["fine"] == said["script"] == "nothing"

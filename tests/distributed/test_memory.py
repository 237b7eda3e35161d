"""No rank stores what it does not own: measured on a model whose weights are 1.2 GB."""

from __future__ import annotations

import re

import pytest

from tests.distributed.harness import Outcome, launch_script

SCRIPT = "tests/distributed/scripts/large_model.py"
# Between what a quarter of the model needs and what all of it needs.
LIMIT = 3_500_000_000

pytestmark = [pytest.mark.large, pytest.mark.timeout(1200)]

# The limit counts what a forked rank has from the warm process, too; its peak counts a part of it, and its memory comes
# in large pages, on all alike.
COLD = [pytest.param(False, id="forked"), pytest.param(True, id="cold", marks=pytest.mark.full)]


def peak(outcome: Outcome, rank: int, after: str) -> int:
    """The largest resident memory of a rank, after it `trained` or `saved`, in bytes."""
    found = re.search(rf"{after}: resident peak (\d+)", outcome.output(rank))
    assert found, outcome.report()
    return int(found[1])


def losses(outcome: Outcome, rank: int) -> list[str]:
    return re.findall(r"^loss (\S+)", outcome.output(rank), re.MULTILINE)


@pytest.fixture(scope="module", params=COLD)
def cold(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def split(cold: bool) -> Outcome:
    """Four ranks, each with a limit on its data segment."""
    return launch_script(4, SCRIPT, ["--limit", str(LIMIT), "--save"], deadline=400, cold=cold)


@pytest.fixture(scope="module")
def alone(cold: bool) -> Outcome:
    """One process without a limit."""
    return launch_script(1, SCRIPT, deadline=400, launched=False, cold=cold)


def test_four_ranks_train_and_save_under_a_limit(split: Outcome) -> None:
    split.expect_clean()


def test_the_same_limit_ends_one_process(cold: bool) -> None:
    outcome = launch_script(1, SCRIPT, ["--limit", str(LIMIT)], deadline=400, launched=False, cold=cold)
    assert not outcome.timed_out, outcome.report()
    assert outcome.returncode != 0, outcome.report()
    assert "trained" not in outcome.output(0), outcome.report()


def test_each_of_four_ranks_peaks_below_half_of_one_process(split: Outcome, alone: Outcome) -> None:
    # To train is what takes most there.
    whole = peak(alone.expect_clean(), 0, "trained")
    assert whole > 1_200_000_000
    for rank in range(4):
        largest = peak(split, rank, "saved")
        assert largest < 0.45 * whole, f"rank {rank}: {largest} of {whole}"


def test_the_losses_are_those_of_one_process(split: Outcome, alone: Outcome) -> None:
    assert len(losses(alone, 0)) == 2
    for rank in range(4):
        assert losses(split, rank) == losses(alone, 0)

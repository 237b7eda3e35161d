"""A rank that calls another step than the others, or with another batch, ends all within 30 s."""

from __future__ import annotations

import re

import pytest

from tests.distributed.harness import Outcome, launch_script

SCRIPT = "tests/distributed/scripts/divergence.py"
SECONDS = 30.0


def ended(size: int, arguments: list[str]) -> Outcome:
    """A run that must have ended with an error in time, leaving nothing behind."""
    outcome = launch_script(size, SCRIPT, arguments, deadline=90.0)
    assert not outcome.timed_out, outcome.report()
    assert outcome.left_behind == [], outcome.report()
    assert outcome.returncode != 0, outcome.report()
    together = max(line.at for line in outcome.lines if "@@ step 2 done" in line.text)
    for rank in range(size):
        at = outcome.ended_at[rank]
        assert at is not None, outcome.report()
        assert at - together < SECONDS, outcome.report()
    return outcome


def last_words(outcome: Outcome, rank: int) -> str:
    said = [text for text in outcome.output(rank).splitlines() if "smp_tf: " in text]
    assert said, outcome.report()
    return said[-1]


@pytest.mark.parametrize(
    ("mode", "odd", "does"),
    [
        ("shape", 0, r"is about to run step 'train' for the first time on x: float32\(12, 8\)"),
        ("step", 1, r"is about to run step 'evaluate' for the first time on x: float32\(16, 8\)"),
    ],
)
def test_a_rank_that_leaves_the_common_path_is_named(mode: str, does: str, odd: int) -> None:
    outcome = ended(2, [mode, "--odd", str(odd)])
    for rank in range(2):
        words = rf"Rank {odd} .*{does}, while rank {1 - odd} .*is in step \d+ and waits .*from rank {odd} "
        assert re.search(words, last_words(outcome, rank)), outcome.report()
        assert "with batches of the same shapes" in last_words(outcome, rank), outcome.report()


@pytest.mark.parametrize(("size", "odd"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.full)])
def test_ranks_in_two_steps_that_both_know_are_named(size: int, odd: int) -> None:
    outcome = ended(size, ["known", "--odd", str(odd)])
    for rank in range(size):
        said = last_words(outcome, rank)
        assert "The ranks are in different steps and wait for each other" in said, outcome.report()
        assert re.search(rf"rank {odd} \(.*?\) is in step \d+ of 'evaluate' on x: float32\(16, 8\) and waits", said), (
            said
        )
        assert re.search(r"rank \d \(.*?\) is in step \d+ of 'train' on x: float32\(16, 8\) and waits", said), said


@pytest.mark.full
def test_a_rank_that_catches_an_error_of_a_step_and_goes_on_is_named() -> None:
    outcome = ended(2, ["caught"])
    assert "@@ caught in step 3" in outcome.output(1), outcome.report()
    for rank in range(2):
        said = last_words(outcome, rank)
        assert "The ranks are in different steps and wait for each other" in said, outcome.report()
        assert re.search(r"rank 0 \(.*?\) is in step 3 of 'train_checked' ", said), said
        assert re.search(r"rank 1 \(.*?\) is in step 4 of 'train_checked' ", said), said
        assert "An error of a step that one rank catches leaves the others in that step" in said, said


def test_a_rank_that_catches_an_error_of_a_step_and_waits_elsewhere_is_named() -> None:
    """The others once waited for it until stall_timeout."""
    outcome = ended(2, ["left"])
    assert "@@ caught in step 3" in outcome.output(1), outcome.report()
    for rank in range(2):
        said = last_words(outcome, rank)
        assert re.search(
            r"Rank 1 .*is at .*barrier.*, while rank 0 .*is in step 3 and waits for .* from rank 1", said
        ), said
        assert "An error of a step that one rank catches leaves the others in that step" in said, said

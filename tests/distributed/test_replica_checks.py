"""Of replicas whose weights are not equal a weight is named; and replicas that are given equal batches are."""

from __future__ import annotations

import re

import pytest

from tests.distributed.harness import Outcome, launch_script

SCRIPT = "tests/distributed/scripts/replicas.py"


def run(size: int, *arguments: str) -> Outcome:
    outcome = launch_script(size, SCRIPT, arguments)
    assert not outcome.timed_out, outcome.report()
    assert outcome.left_behind == [], outcome.report()
    return outcome


def words_of(outcome: Outcome) -> str:
    return "\n".join(line.text for line in outcome.lines)


@pytest.mark.parametrize(
    ("size", "partitions", "ranks"),
    [
        # The second stage of both replicas.
        (4, 2, [1, 3]),
        pytest.param(2, 1, [0, 1], marks=pytest.mark.full),
    ],
)
def test_a_weight_that_is_not_the_same_on_all_replicas_is_an_error(
    size: int, partitions: int, ranks: list[int]
) -> None:
    outcome = run(size, "apart", "--partitions", str(partitions))
    assert outcome.returncode != 0, outcome.report()
    words = words_of(outcome)
    assert f"the ranks {ranks} do not have the same values of weight] [net/head/bias:0]" in words, outcome.report()
    assert "check_replicas=False. Steps before this one:] [1]" in words, outcome.report()
    assert all(line.text != "finished" for line in outcome.lines), outcome.report()


@pytest.fixture(scope="module")
def warned() -> Outcome:
    """Replicas that soon read the same data, and whose weights part later."""
    outcome = run(2, "apart meeting", "--at", "57", "--steps", "250", "--partitions", "1")
    outcome.expect_clean()
    return outcome


def test_weights_that_part_later_are_told_of_once_and_end_nothing(warned: Outcome) -> None:
    """Ranks that round differently drift apart in the last bit."""
    said = [line for line in warned.lines if "do not have the same values of weight" in line.text]
    assert sorted(line.rank for line in said) == [0, 1], warned.report()
    for line in said:
        assert (
            'the ranks [0, 1] do not have the same values of weight "net/head/bias:0" It may be rounding' in line.text
        )
        assert line.text.endswith("Steps before this one: 100")


def test_replicas_that_read_the_same_data_are_named_once(warned: Outcome) -> None:
    """The second call alone was looked at, and data that began unlike went unnoticed."""
    was_named_once(warned, call=5)


@pytest.mark.full
def test_replicas_of_two_stages_that_read_the_same_data_are_named_once() -> None:
    was_named_once(run(4, "together").expect_clean(), call=2)


def was_named_once(outcome: Outcome, call: int) -> None:
    said = [line for line in outcome.lines if "were given the same batch" in line.text]
    assert [line.rank for line in said] == [0], outcome.report()
    assert f"in call {call} of step 'forward_backward', these replicas were given the same batch: [0 1]" in (
        said[0].text
    )


@pytest.mark.full
def test_replicas_with_equal_weights_and_data_of_their_own_hear_nothing() -> None:
    outcome = run(2, "own", "--partitions", "1", "--steps", "120")
    outcome.expect_clean()
    assert "same batch" not in words_of(outcome)


@pytest.mark.full
def test_both_checks_can_be_switched_off() -> None:
    outcome = run(2, "apart together", "--partitions", "1", "--unchecked")
    outcome.expect_clean()
    assert "same batch" not in words_of(outcome)


@pytest.mark.full
def test_replicas_that_average_gradients_of_different_steps_are_named() -> None:
    """They once waited in Horovod until stall_timeout."""
    outcome = run(2, "other", "--partitions", "1")
    assert outcome.returncode != 0, outcome.report()
    place = r"in step \d of '(forward_backward|penalty_of)' on .*"
    waited = rf"Rank \d .* has waited \d+ s for the other replicas at 'smp_gradients_.*' {place}"
    other = rf"while rank \d .* has been {place} and waits at 'smp_gradients_.*'"
    found = rf"{waited}, {other}\. Each averages gradients with the other"
    assert re.search(found, words_of(outcome)), outcome.report()

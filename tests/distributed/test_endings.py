"""However one rank ends, all of them end soon, cleanly, and say why."""

from __future__ import annotations

import signal

import pytest

from tests.distributed.harness import LAUNCHER, Job, Line, Outcome, launch_script

SCRIPT = "tests/distributed/scripts/endings.py"
# From the first rank's end to the last one's.
SECONDS = 10.0


def run(way: str, **options: object) -> Outcome:
    outcome = launch_script(2, SCRIPT, [way], deadline=60.0, **options)  # type: ignore[arg-type]
    assert not outcome.timed_out, outcome.report()
    assert outcome.left_behind == [], outcome.report()
    ends = [end for end in outcome.ended_at if end is not None]
    assert len(ends) == 2, outcome.report()
    assert max(ends) - min(ends) < SECONDS, outcome.report()
    return outcome


def last_words(outcome: Outcome, rank: int) -> str:
    said = [line for line in outcome.output(rank).splitlines() if "smp_tf: " in line]
    assert said, outcome.report()
    return said[-1]


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("raise_an_exception", "failed: ValueError: the data are not there (at "),
        ("wait_in_horovod", "failed: ValueError: never came to the sum (at "),
    ],
)
def test_an_exception_on_one_rank_is_the_cause_on_all(way: str, cause: str) -> None:
    outcome = run(way)
    assert outcome.returncode != 0
    for rank in range(2):
        assert "rank 1 (host " in last_words(outcome, rank), outcome.report()
        assert cause in last_words(outcome, rank), outcome.report()
    # A rank that waited prints its own error, and after it the cause again.
    assert [line for line in outcome.output(0).splitlines() if line][-1] == last_words(outcome, 0)
    assert "Traceback (most recent call last)" in outcome.output(1)
    assert "ValueError: " in outcome.output(1)
    # The launcher sends SIGTERM to the slower of the two, and SIGKILL seconds later, which a busy host may need to take
    # TensorFlow down; and it may not say then how the rank ended.
    assert 1 in outcome.exit_codes, outcome.report()
    ways = {1, 128 + signal.SIGTERM, 128 + signal.SIGKILL, None}
    assert set(outcome.exit_codes) <= ways, outcome.report()


def test_a_killed_rank_is_named() -> None:
    outcome = run("die")
    words = last_words(outcome, 0)
    assert "rank 1" in words
    assert outcome.exit_codes[0] != 0


def test_leaving_early_is_noticed() -> None:
    outcome = run("leave_early")
    words = last_words(outcome, 0)
    assert "rank 1" in words
    assert "left" in words
    assert outcome.returncode != 0


@pytest.mark.parametrize(
    ("way", "number", "target"),
    [
        ("wait", signal.SIGINT, LAUNCHER),
        ("wait", signal.SIGINT, 0),
        ("wait", signal.SIGTERM, 1),
        ("fit", signal.SIGINT, LAUNCHER),
    ],
)
def test_signals_end_all(way: str, number: signal.Signals, target: int) -> None:
    waiting: set[int] = set()

    def send_when_all_wait(job: Job, line: Line) -> None:
        if "@@ waiting" in line.text:
            waiting.add(line.rank)
            if waiting == {0, 1}:
                job.kill(target, number)

    outcome = run(way, on_line=send_when_all_wait)
    assert waiting == {0, 1}
    if target == LAUNCHER:
        # What the launcher then returns itself depends on who is faster: now and then 0.
        for rank in range(2):
            assert "was ended by SIGTERM" in last_words(outcome, rank), outcome.report()
    else:
        assert outcome.returncode != 0
        assert f"rank {target} " in last_words(outcome, 1 - target), outcome.report()


def test_ranks_configured_apart_are_told_so() -> None:
    outcome = run("configure_apart")
    for rank in range(2):
        words = outcome.output(rank)
        assert "The ranks do not agree on what smp.init was given:" in words
        assert "configuration.microbatches: rank 1 (host " in words
        assert "has 2; rank 0 has 1" in words

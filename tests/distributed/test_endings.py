"""However one rank ends, also in smp.init, beside Horovod or in fit, all of them end soon, cleanly, and say why."""

from __future__ import annotations

import re
import signal
import socket

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


def test_an_exception_beside_a_collective_of_horovod_is_the_cause_on_all() -> None:
    outcome = run("raise_beside_horovod")
    assert outcome.returncode != 0
    for rank in range(2):
        assert "rank 1 (host " in last_words(outcome, rank), outcome.report()
        assert "failed: ValueError: never came to the sum (at " in last_words(outcome, rank), outcome.report()
    # A rank that waited prints its own error, and after it the cause.
    assert [line for line in outcome.output(0).splitlines() if line][-1] == last_words(outcome, 0)
    assert "Traceback (most recent call last)" in outcome.output(1)
    assert "ValueError: " in outcome.output(1)
    # The launcher sends SIGTERM to the slower of the two, and SIGKILL seconds later, which a busy host may need to take
    # TensorFlow down; and it may not say then how the rank ended.
    assert 1 in outcome.exit_codes, outcome.report()
    ways = {1, 128 + signal.SIGTERM, 128 + signal.SIGKILL, None}
    assert set(outcome.exit_codes) <= ways, outcome.report()


def test_a_rank_killed_beside_a_collective_of_horovod_is_named() -> None:
    outcome = run("die_beside_horovod")
    host = re.escape(socket.gethostname())
    assert re.search(
        rf"rank 1 \(host {host}, process \d+\) was lost: [^.]+\. Rank 0 \(host {host}\) was before the first step$",
        last_words(outcome, 0),
    ), outcome.report()
    assert outcome.exit_codes[0] != 0


def assert_the_launcher_names_the_killed_rank(outcome: Outcome) -> None:
    assert outcome.returncode != 0
    assert re.search(
        r"The first process to do so was:\nProcess name: 1\nExit code: 137$", outcome.output(LAUNCHER), re.M
    )


WAYS = ["die_after_import", "die_before_init", "die_in_horovod", "die_in_greeting", "die_in_init"]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_killed_before_the_ranks_have_met_is_named(way: str) -> None:
    """Ranks cannot watch each other yet, and it was the launcher alone that named one, without its host."""
    outcome = run(way, cold=way == "die_after_import")
    assert_the_launcher_names_the_killed_rank(outcome)
    assert outcome.exit_codes[0] != 0
    host = re.escape(socket.gethostname())
    where = "before" if way == "die_after_import" else "in"
    # Who has it first, the launcher's signal or Horovod's thread, differs; both say it where the signal comes to a rank
    # that has printed its error and has not ended yet.
    by_signal = rf"was ended by SIGTERM {where} smp.init: rank 1 \(host {host}, pid \d+\) had ended\."
    ended = rf"Rank 1 \(host {host}, pid \d+\) ended while (?:the ranks greeted|Horovod started)"
    by_both = rf"was ended by SIGTERM in smp.init: {ended}"
    signalled = len(re.findall(rf"smp_tf: rank 0 \(host {host}\) (?:{by_signal}|{by_both})", outcome.output(0)))
    raised = len(re.findall(rf"PeerError: {ended}", outcome.output(0)))
    assert (signalled, raised) in ((1, 0), (0, 1), (1, 1)), outcome.report()
    assert len(re.findall(r"[Rr]ank 1 \(host", outcome.output(0))) == signalled + raised, outcome.report()


@pytest.mark.parametrize("way", ["die_in_shutdown", "die_at_exit"])
def test_a_rank_killed_at_the_end_ends_all(way: str) -> None:
    outcome = run(way)
    assert_the_launcher_names_the_killed_rank(outcome)
    if way == "die_in_shutdown":
        assert re.search(r"rank 1 \(host .*\) was lost: ", last_words(outcome, 0)), outcome.report()


@pytest.mark.parametrize(
    ("way", "number", "target"),
    [
        ("fit", signal.SIGINT, LAUNCHER),
        pytest.param("wait", signal.SIGINT, 0, marks=pytest.mark.full),
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

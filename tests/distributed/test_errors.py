"""Errors, never hangs: whatever happens to one rank, all end soon and say why.

Each test runs a whole script and acts when a rank prints a line. `horovodrun` gives ranks five
seconds after the first failure, so what they have to say must be said by then.
"""

from __future__ import annotations

import re
import signal
import socket

import pytest

from tests.distributed.harness import LAUNCHER, Job, Line, Outcome, launch_script

SCRIPT = "tests/distributed/scripts/training.py"


class Killer:
    """Sends a signal when a rank prints a line, and remembers when."""

    def __init__(self, text: str, rank: int, number: signal.Signals, watch: int) -> None:
        self._text, self._rank, self._number, self._watch = text, rank, number, watch
        self.at: float | None = None

    def __call__(self, job: Job, line: Line) -> None:
        if self.at is None and line.text.startswith(self._text) and line.rank == self._watch:
            self.at = line.at
            job.kill(self._rank, self._number)


def run(
    size: int, *arguments: str, killer: Killer | None = None, deadline: float = 90.0, cold: bool = False
) -> Outcome:
    outcome = launch_script(size, SCRIPT, arguments, deadline=deadline, on_line=killer, cold=cold)
    assert not outcome.timed_out, outcome.report()
    assert outcome.left_behind == [], outcome.report()
    return outcome


def messages(outcome: Outcome, rank: int) -> list[str]:
    """What smp_tf printed on a rank about a failure, line by line.

    It prefixes what it says; Horovod's thread may have begun the line with words of its own.
    """
    said = (line.text.partition("smp_tf: ")[2] for line in outcome.lines if line.rank == rank)
    return [text for text in said if "rank" in text]


def test_a_whole_run_is_clean() -> None:
    run(2, "well", "--save").expect_clean()


KILL_MOMENTS = {
    "initialised": "initialised",
    "tracing": "tracing",
    "first_step": "step 0 done",
    "later_step": "step 3 done",
    "saving": "saving",
}


# Four ranks, which take long to start, at two of the moments; at all with `--full`.
@pytest.mark.parametrize(
    ("moment", "size"),
    [
        pytest.param(
            moment, size, marks=[pytest.mark.full] if size == 4 and moment not in ("first_step", "saving") else []
        )
        for moment in KILL_MOMENTS
        for size in (2, 4)
    ],
)
def test_a_killed_rank_ends_all_within_ten_seconds(moment: str, size: int) -> None:
    lost = size - 1
    killer = Killer(KILL_MOMENTS[moment], lost, signal.SIGKILL, watch=lost)
    # One save may be over before its rank is killed.
    rest = ("--save", "1000") if moment == "saving" else ("--steps", "2000", "--save")
    outcome = run(size, "well", *rest, killer=killer)
    assert killer.at is not None, outcome.report()
    assert outcome.returncode != 0
    for rank in range(size - 1):
        ended = outcome.ended_at[rank]
        assert ended is not None
        assert ended - killer.at < 10.0, outcome.report()
        told = [text for text in messages(outcome, rank) if f"rank {lost}" in text]
        assert told, outcome.report()
        assert socket.gethostname() in told[0], told
        if "step" in moment:
            assert re.search(r"step \d+", told[0]), told


def test_the_first_rank_may_be_the_lost_one() -> None:
    killer = Killer("step 3 done", 0, signal.SIGKILL, watch=0)
    outcome = run(2, "well", "--steps", "2000", killer=killer)
    assert any("rank 0" in text for text in messages(outcome, 1)), outcome.report()


def test_a_rank_killed_while_others_wait_for_it() -> None:
    killer = Killer("pausing", 1, signal.SIGKILL, watch=1)
    outcome = run(2, "pause", killer=killer)
    assert killer.at is not None
    assert outcome.ended_at[0] - killer.at < 10.0, outcome.report()
    assert any("rank 1" in text for text in messages(outcome, 0)), outcome.report()


def test_an_exception_on_one_rank_is_the_stated_cause_on_all() -> None:
    outcome = run(3, "raise")
    for rank in (0, 2):
        told = [text for text in messages(outcome, rank) if "there is no sample number 48" in text]
        assert told, outcome.report()
        assert "rank 1" in told[0]
        assert "LookupError" in told[0]
    assert "Traceback" in outcome.output(1)


@pytest.mark.parametrize("mode", ["leave", "exit"])
def test_leaving_the_loop_early_is_noticed_at_once(mode: str) -> None:
    outcome = run(2, mode, "--steps", "2000")
    assert outcome.returncode != 0, outcome.report()
    assert any("rank 1" in text for text in messages(outcome, 0)), outcome.report()
    left = outcome.ended_at[1]
    assert outcome.ended_at[0] - left < 10.0


@pytest.mark.parametrize(
    ("mode", "words"),
    [("shape", ("16", "12")), ("model", ("16", "20")), ("data", ("x",))],
)
def test_a_rank_that_differs_is_named_with_what_differs(mode: str, words: tuple[str, ...]) -> None:
    at = "0" if mode == "model" else "3"
    outcome = run(2, mode, "--at", at, "--steps", "2000", deadline=60)
    assert outcome.returncode != 0
    for rank in range(2):
        said = outcome.output(rank)
        assert "rank 1" in said, outcome.report()
        assert all(word in said for word in words), outcome.report()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
def test_signals_to_the_launcher_end_all(number: signal.Signals) -> None:
    killer = Killer("pausing", LAUNCHER, number, watch=1)
    outcome = run(2, "pause", killer=killer)
    assert killer.at is not None
    for end in outcome.ended_at:
        assert end is not None
        assert end - killer.at < 15.0, outcome.report()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
def test_a_signal_to_a_rank_inside_tensorflow_ends_all(number: signal.Signals) -> None:
    killer = Killer("pausing", 0, number, watch=1)  # rank 0 waits for rank 1, in C++
    outcome = run(2, "pause", killer=killer)
    assert killer.at is not None
    for end in outcome.ended_at:
        assert end is not None
        assert end - killer.at < 10.0, outcome.report()
    assert any("rank 0" in text for text in messages(outcome, 1)), outcome.report()


def test_ranks_end_when_the_launcher_is_killed() -> None:
    killer = Killer("step 3 done", LAUNCHER, signal.SIGKILL, watch=1)
    # They look for it among their ancestors.
    outcome = run(2, "well", "--steps", "1000000", killer=killer, cold=True)
    assert killer.at is not None
    for end in outcome.ended_at:
        assert end is not None
        assert end - killer.at < 20.0, outcome.report()


def test_a_late_rank_is_ended_only_after_the_stall_timeout() -> None:
    outcome = run(2, "pause", "--stall-timeout", "40", deadline=120)
    report = outcome.line_with("has waited", rank=0)
    assert report is not None, outcome.report()
    assert "rank 1" in report.text
    assert outcome.ended_at[0] - report.at > 5.0, "it was ended with the first report"

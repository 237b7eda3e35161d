"""Errors, never hangs: whatever happens to one rank, all end soon and say why.

Each test runs a whole script and acts when a rank prints a line. `horovodrun` gives ranks five
seconds after the first failure, so what they have to say must be said by then.
"""

from __future__ import annotations

import re
import signal
import socket
from dataclasses import dataclass

import pytest

from tests.distributed.harness import LAUNCHER, Job, Line, Outcome, launch_script
from tests.full_only import params

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
    size: int,
    *arguments: str,
    killer: Killer | None = None,
    deadline: float = 90.0,
    cold: bool = False,
) -> Outcome:
    outcome = launch_script(size, SCRIPT, arguments, deadline=deadline, on_line=killer, cold=cold)
    assert not outcome.timed_out, outcome.report()
    assert not outcome.left_behind, outcome.report()
    return outcome


def message(outcome: Outcome, rank: int) -> str:
    """The one thing that smp_tf said on a rank about a failure.

    It prefixes what it says; Horovod's thread may have begun the line with words of its own. In brackets is what
    TensorFlow quotes.
    """
    said = (re.search(r"(?<!\[)smp_tf: (.*)", line.text) for line in outcome.lines if line.rank == rank)
    told = [text[1].removeprefix(f"[rank {rank}] ") for text in said if text is not None and "rank" in text[1]]
    assert len(told) == 1, outcome.report()
    return told.pop()


def named(rank: int) -> str:
    """A pattern for a rank as the transport names it."""
    return rf"rank {rank} \(host {re.escape(socket.gethostname())}, process \d+\)"


def assert_all_end_within(seconds: float, outcome: Outcome, since: float | None) -> None:
    assert since is not None, outcome.report()
    for end in outcome.ended_at:
        assert end is not None, outcome.report()
        assert end - since < seconds, outcome.report()


def test_a_whole_run_is_clean() -> None:
    run(2, "well", "--steps", "3", "--save").expect_clean()


@dataclass(frozen=True)
class Kill:
    """A rank is killed when it prints a line; what the message then says of the step of another."""

    at: str
    size: int
    lost: int
    step: str
    partitions: int = 0
    #: As horovodrun starts the ranks, and kills what is left of them.
    cold: bool = False

    def arguments(self) -> list[str]:
        # One save may be over before its rank is killed.
        lasting = ["--save", "1000"] if self.at == "saving" else ["--steps", "2000"]
        return [*lasting, "--partitions", str(self.partitions or self.size)]


FIRST, LATER = "before the first step", r"(in|after) step \d+"
KILLS = {
    "initialised": Kill("initialised", 2, 1, FIRST),
    "tracing": Kill("tracing", 2, 1, FIRST),
    "later_step": Kill("step 3 done", 2, 0, LATER, cold=True),
    "saving": Kill("saving", 2, 1, LATER),
    # A rank in the middle: the last stage of the first replica, whose others average with it.
    "replicas": Kill("step 0 done", 4, 1, LATER, partitions=2),
}
# Four ranks take long to start.
MORE_KILLS = {
    "saving_of_4": Kill("saving", 4, 2, LATER),
    "initialised_of_4": Kill("initialised", 4, 3, FIRST),
    "tracing_of_4": Kill("tracing", 4, 0, FIRST),
    "first_step_of_4": Kill("step 0 done", 4, 3, LATER),
    "later_step_of_4": Kill("step 3 done", 4, 2, LATER),
}


@pytest.mark.parametrize(
    "kill",
    [
        *(pytest.param(kill, id=name) for name, kill in KILLS.items()),
        *(pytest.param(kill, id=name, marks=pytest.mark.full) for name, kill in MORE_KILLS.items()),
    ],
)
def test_a_killed_rank_ends_all_within_ten_seconds_and_is_named(kill: Kill) -> None:
    killer = Killer(kill.at, kill.lost, signal.SIGKILL, watch=kill.lost)
    outcome = run(kill.size, "well", *kill.arguments(), killer=killer, cold=kill.cold)
    assert outcome.returncode != 0
    assert_all_end_within(10.0, outcome, killer.at)
    others = [rank for rank in range(kill.size) if rank != kill.lost]
    teller = rf"Rank [{''.join(map(str, others))}] \(host {re.escape(socket.gethostname())}\)"
    expected = rf"{named(kill.lost)} was lost: [^.]+\. {teller} was {kill.step}"
    for rank in others:
        assert re.fullmatch(expected, message(outcome, rank)), outcome.report()


def test_a_rank_killed_while_all_start_ends_all_within_ten_seconds_and_is_named_by_the_launcher() -> None:
    """Ranks do not know each other yet."""
    killer = Killer("imported", 1, signal.SIGKILL, watch=1)
    outcome = run(2, "well", "--steps", "2000", killer=killer)
    # The other may not have started yet, and then never does: nothing is left behind; the launcher has the last word.
    assert killer.at is not None
    ends = [end for end in outcome.ended_at if end is not None]
    assert all(end - killer.at < 10.0 for end in (*ends, outcome.lines[-1].at)), outcome.report()
    assert outcome.returncode != 0
    assert "The first process to do so was:\nProcess name: 1\nExit code: 137" in outcome.output(LAUNCHER)
    assert outcome.line_with("initialised") is None, outcome.report()


def test_a_rank_killed_while_others_wait_for_it() -> None:
    killer = Killer("pausing", 1, signal.SIGKILL, watch=1)
    outcome = run(2, "pause", killer=killer)
    assert_all_end_within(10.0, outcome, killer.at)
    assert re.match(named(1) + " was lost: .* was in step 3$", message(outcome, 0)), outcome.report()


def test_an_exception_on_one_rank_is_the_stated_cause_on_all() -> None:
    outcome = run(3, "raise")
    for rank in (0, 2):
        assert re.match(
            r"rank 1 \(host .*\) failed: LookupError: there is no sample number 48 \(at .*training\.py:\d+ in ",
            message(outcome, rank),
        ), outcome.report()
    assert "Traceback" in outcome.output(1)
    # A thread that still looked at other ranks, when Python had closed the transport, printed tracebacks at the end.
    assert [line for line in outcome.output(1).splitlines() if line.startswith("at exit:")] == ["at exit:"]


@pytest.mark.parametrize("mode", params(["leave", "exit"], only_full={"exit"}))
def test_leaving_the_loop_early_is_noticed_at_once(mode: str) -> None:
    outcome = run(2, mode, "--steps", "2000")
    assert outcome.returncode != 0, outcome.report()
    assert re.match(named(1) + " left the loop early after step 2; ", message(outcome, 0)), outcome.report()
    assert_all_end_within(10.0, outcome, outcome.ended_at[1])


def test_a_rank_that_traced_another_model_is_named_with_what_differs() -> None:
    outcome = run(2, "model", "--steps", "2000", deadline=60)
    assert outcome.returncode != 0
    assert_all_end_within(30.0, outcome, max(line.at for line in outcome.lines if line.text == "tracing"))
    variable = "has variable 'net/dense/kernel' of type float32[8,{}], trainable, of the model"
    expected = re.escape(
        "The ranks traced different models for step 'forward_backward'. The first difference: "
        f"rank 0 {variable.format(16)}, rank 1 (@) {variable.format(20)}. Every rank must build the same model in the "
        "same way; nothing in it may depend on the rank."
    )
    for rank in range(2):
        assert re.fullmatch(expected.replace("@", "host .*"), message(outcome, rank)), outcome.report()


def test_a_rank_that_is_fed_another_batch_is_named_with_what_differs() -> None:
    outcome = run(2, "data", "--steps", "2000", deadline=60)
    assert outcome.returncode != 0
    assert_all_end_within(30.0, outcome, max(line.at for line in outcome.lines if line.text == "step 2 done"))
    expected = (
        r"rank 0 \(host .*\) ends the job: all ranks of a replica need the same batch in the same order. In step "
        r"'forward_backward', argument 'x' on rank 1 differs from that on rank 0. .* Step: 3"
    )
    for rank in range(2):
        assert re.fullmatch(expected, message(outcome, rank)), outcome.report()


@pytest.mark.parametrize(
    "number",
    [
        # In test_endings.py it ends a fit.
        pytest.param(signal.SIGINT, id="ctrl_c", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, id="sigterm"),
    ],
)
def test_signals_to_the_launcher_end_all(number: signal.Signals) -> None:
    killer = Killer("pausing", LAUNCHER, number, watch=1)
    outcome = run(2, "pause", killer=killer)
    assert_all_end_within(15.0, outcome, killer.at)
    # The rank that ends last may be told by the error of its step, and end before it has said more.
    for rank in range(2):
        assert "was ended by SIGTERM" in outcome.output(rank), outcome.report()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        # Python, too, acts on Ctrl-C, once the op has ended that the main thread waits in.
        pytest.param(
            signal.SIGINT, r"(ends in step 3: was ended by SIGINT \(Ctrl-C\)|was ended by Ctrl-C)", id="ctrl_c"
        ),
        # The launcher sends it to both, in the test above.
        pytest.param(signal.SIGTERM, "ends in step 3: was ended by SIGTERM", id="sigterm", marks=pytest.mark.full),
    ],
)
def test_a_signal_to_a_rank_inside_tensorflow_ends_all(number: signal.Signals, words: str) -> None:
    killer = Killer("pausing", 0, number, watch=1)  # rank 0 waits for rank 1, in C++
    outcome = run(2, "pause", killer=killer)
    assert_all_end_within(10.0, outcome, killer.at)
    assert re.fullmatch(rf"rank 0 \(host .*\) {words}", message(outcome, 1)), outcome.report()


def test_ranks_end_when_the_launcher_is_killed() -> None:
    killer = Killer("pausing", LAUNCHER, signal.SIGKILL, watch=1)  # rank 0 waits for rank 1, in C++
    # They look for it among their ancestors.
    outcome = run(2, "pause", killer=killer, cold=True)
    assert_all_end_within(20.0, outcome, killer.at)


def test_a_late_rank_is_ended_only_after_the_stall_timeout() -> None:
    outcome = run(2, "pause", "--stall-timeout", "40", deadline=120)
    report = outcome.line_with("has waited", rank=0)
    assert report is not None, outcome.report()
    # By default after 30 s, and before the end.
    said = named(0) + r" has waited 3\d(\.\d+)? s for .* from " + named(1) + r"\. Rank 1 is alive and "
    assert re.search(said, report.text), outcome.report()
    assert outcome.ended_at[0] - report.at > 5.0, "it was ended with the first report"
    expected = named(0) + " gave up in step 3 after stall_timeout = 40 s: it waited for the .* from " + named(1)
    for rank in range(2):
        last = [line.text for line in outcome.lines if line.rank == rank and "smp_tf: " in line.text][-1]
        assert re.search(f"{expected}$", last), outcome.report()

"""A rank that keeps the others waiting has `stall_timeout` for that, whatever they wait in; then all end.

Where they wait for a message, test_errors.py shows it.
"""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Mapping

import pytest

from tests.distributed.harness import Job, Line, Outcome, launch_script, on_marker
from tests.full_only import params

SCRIPT = "tests/distributed/scripts/training.py"


def run(
    *arguments: str, on_line: Callable[[Job, Line], None] | None = None, environment: Mapping[str, str] | None = None
) -> Outcome:
    outcome = launch_script(2, SCRIPT, arguments, deadline=120.0, on_line=on_line, environment=environment)
    assert not outcome.timed_out, outcome.report()
    assert outcome.left_behind == [], outcome.report()
    return outcome


def send(rank: int, number: signal.Signals) -> Callable[[Job, Line], None]:
    return lambda job, line: job.kill(rank, number)


def both(*watchers: Callable[[Job, Line], None]) -> Callable[[Job, Line], None]:
    def on_line(job: Job, line: Line) -> None:
        for watcher in watchers:
            watcher(job, line)

    return on_line


def test_a_replica_that_does_not_come_to_a_step_ends_all_after_stall_timeout() -> None:
    """It was once reported, and waited for without end: no message is waited for, but Horovod."""
    outcome = run("pause", "--partitions", "1", "--stall-timeout", "6")
    assert outcome.returncode != 0
    end = (
        r"Rank 0 \(host .*\) gave up in step 3 of 'forward_backward' on .* after stall_timeout = 6 s: it waited for "
        r"the other replicas at 'smp_gradients_.*', and rank 1 \(host .*\) ended its step 2 \d+ s ago\. "
    )
    for rank in range(2):
        assert re.search(end, outcome.output(rank)), outcome.report()


def test_a_rank_that_hangs_within_a_step_ends_all_after_stall_timeout() -> None:
    """Whether its replicas wait for it or compute was once not known, so they waited without end."""
    outcome = run("hang", "--partitions", "1", "--stall-timeout", "6")
    assert outcome.returncode != 0
    assert outcome.line_with("hanging", rank=1) is not None, outcome.report()
    end = (
        r"Rank 0 \(host .*\) gave up in step 3 of 'forward_backward' on .* after stall_timeout = 6 s: it waited for "
        r"the other replicas at 'smp_gradients_.*', and rank 1 \(host .*\) has been in step 3 of 'forward_backward' "
        r"on .* for \d+ s and computes, or hangs there\. "
    )
    for rank in range(2):
        assert re.search(end, outcome.output(rank)), outcome.report()


IN_HOROVOD = {
    "broadcast": ("after step 0 of .*", "the other replicas", "smp_initial_state_0"),
    "function": ("before its first step", "other processes", "hvd.allgather of_the_script"),
    "raw": ("before its first step", "other processes", "hvd.allreduce below"),
}


@pytest.mark.parametrize("mode", params(IN_HOROVOD, only_full={"function", "raw"}))
def test_a_rank_that_does_not_come_to_an_op_of_horovod_ends_all_after_stall_timeout(mode: str) -> None:
    """Others once waited without end and without a word, for a broadcast and in what the script calls itself."""
    outcome = launch_script(2, "tests/distributed/scripts/horovod_waits.py", [mode], deadline=120.0)
    assert not outcome.timed_out, outcome.report()
    assert outcome.returncode != 0
    place, whom, name = IN_HOROVOD[mode]
    end = (
        rf"Rank 0 \(host .*\) gave up {place} after stall_timeout = 3 s: it waited for {whom} at '{name}', and rank 1 "
    )
    for rank in range(2):
        assert re.search(end, outcome.output(rank)), outcome.report()


def test_a_replica_that_is_stopped_ends_all_after_stall_timeout() -> None:
    """It once was not reported, and Horovod ended the job after 30 s without saying why."""
    stop = on_marker("step 3 done", send(1, signal.SIGSTOP), ranks={1})
    outcome = run("well", "--steps", "2000", "--partitions", "1", "--stall-timeout", "4", on_line=stop)
    assert outcome.returncode != 0
    assert re.search(
        r"Rank 0 \(host .*\) gave up in step \d+ .* after stall_timeout = 4 s: it waited for the other replicas at "
        r"'smp_gradients_.*', and rank 1 \(host .*\) does not answer: its process is stopped",
        outcome.output(0),
    ), outcome.report()


@pytest.mark.full
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_rank_that_was_stopped_for_longer_than_30_s_goes_on(partitions: int) -> None:
    """Horovod once ended the job after 30 s."""
    stop = on_marker("step 3 done", send(1, signal.SIGSTOP), ranks={1})
    go_on = on_marker("does not answer", send(1, signal.SIGCONT))
    outcome = run("well", "--steps", "6", "--partitions", str(partitions), on_line=both(stop, go_on))
    outcome.expect_clean()
    assert outcome.line_with("does not answer", rank=0) is not None, outcome.report()


@pytest.mark.full
def test_horovods_patience_is_what_the_environment_of_a_rank_says() -> None:
    """So it is smp_tf's setting that counts, and who has one of his own keeps it."""
    outcome = run("late", environment={"HOROVOD_GLOO_TIMEOUT_SECONDS": "2"})
    assert outcome.returncode != 0
    assert "Wait timeout after 2 seconds" in outcome.output(0), outcome.report()


def test_a_rank_that_does_not_come_to_smp_init_ends_all_after_stall_timeout() -> None:
    outcome = run("late", "--stall-timeout", "2")
    assert outcome.returncode != 0
    assert re.search(
        r"smp_tf: rank 0 gave up in smp.init after stall_timeout = 2 s: it waited for rank 1 \(host "
        rf"{re.escape(socket.gethostname())}, pid \d+\), which has not come to it\. ",
        outcome.output(0),
    ), outcome.report()


@pytest.mark.full
def test_a_rank_that_comes_to_smp_init_30_s_later_is_reported_and_waited_for() -> None:
    """Horovod once ended the job after 30 s."""
    go_on = on_marker("has waited 30 s in smp.init", send(1, signal.SIGUSR2))
    outcome = run("late", "--steps", "2", on_line=go_on)
    outcome.expect_clean()
    said = (
        rf"in smp.init for rank 1 \(host {re.escape(socket.gethostname())}, pid \d+\), which has not come to it\. The"
    )
    assert re.search(said, outcome.output(0)), outcome.report()


@pytest.mark.parametrize("wait", params([True, False], only_full={False}))
def test_a_replica_that_leaves_the_loop_early_is_noticed_in_the_next_step(wait: bool) -> None:
    """One that left before the other came to its next step was once noticed by Horovod alone, after 30 s."""
    outcome = run("leave", "--partitions", "1", "--steps", "2000", *(["--wait"] if wait else []))
    assert outcome.returncode != 0
    ends = [end for end in outcome.ended_at if end is not None]
    assert max(ends) - min(ends) < 20.0, outcome.report()
    assert re.search(
        r"rank 1 \(host .*\) left the loop early after step 2; rank 0 \(host .*\) is in step 3\. All ranks need as "
        r"many batches: smp\.shard_dataset gives every replica as many, and drop_remainder=True",
        outcome.output(0),
    ), outcome.report()

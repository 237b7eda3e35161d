"""Runs a job to its end, again after a failure where that is asked for, and returns the exit code."""

from __future__ import annotations

from pathlib import Path

from smp_tf.launch import endings, wire_up
from smp_tf.launch.failure import Failure, failure_of, render
from smp_tf.launch.job import Request, run_job
from smp_tf.launch.screen import Screen


def launch(request: Request, screen: Screen, restarts: int, log: Path | None) -> int:
    """Runs a job, and tells of its failures.

    Args:
        request: what is to run.
        screen: shows what the ranks print.
        restarts: how often a failed job is started again.
        log: the file of a rank's output, with "{rank}" in it; None where there is none.

    Returns:
        The exit code: 0, that of the rank which failed first, or 128 and the number of the signal that ended the job.

    Raises:
        LaunchError: the ranks cannot be started.
    """
    with wire_up.open_store(request.hosts) as store:
        for number in range(1, restarts + 2):
            end = run_job(request, store, screen, number)
            if end.signal is not None:
                screen.say(f"smp-tf: the job was ended by {endings.name_of(end.signal)}.")
                return endings.exit_code(-end.signal)
            if not end.has_failed:
                return 0
            failure = failure_of(end, screen.said, list(screen.kept.values()), log)
            left = restarts + 1 - number
            _tell(failure, screen, number, left)
            if not left:
                return failure.code
            screen.say(
                f"smp-tf: try {number + 1} of {restarts + 1} begins. A script goes on from its newest checkpoint if it "
                f"restores it."
            )
            screen.said.clear()
    raise AssertionError("a loop over one try or more has ended")


def _tell(failure: Failure, screen: Screen, number: int, left: int) -> None:
    tries = f" (try {number} of {number + left})" if number + left > 1 else ""
    screen.say(render(failure, f"the job failed{tries}", screen.width, screen.is_colored))

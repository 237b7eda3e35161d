"""The harness itself: what it reports when processes fail, hang, or leave things behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import job, pool, rank_main
from tests.distributed.harness import LAUNCHER, ROOT, Case, Job, Line, launch, launch_script, on_marker
from tests.distributed.job import delete_folders, running_test
from tests.distributed.pool import POOLS

SCRIPT = "tests/distributed/scripts/harness_job.py"
CASES = "tests.distributed.cases.harness"
# Ranks that are not forked import TensorFlow, which takes them seconds.
COLD = [False, pytest.param(True, marks=pytest.mark.full)]


def test_cases_return_values_arrays_and_words_per_rank() -> None:
    results = launch(2, CASES, [Case("values", "give_values", {"factor": 0.5}, None)])
    values = results["values"].values()
    assert [value["rank"] for value in values] == [0, 1]
    assert values[1]["array"].tolist() == [0.0, 0.5, 1.0]
    assert values[0]["nested"] == [{"x": 1.5}]
    assert results["values"].output == ["words of rank 0", "words of rank 1"]


def test_a_failing_case_is_reported_and_the_next_cases_run() -> None:
    cases = [
        Case("raises", "raise_on", {"raising_rank": 1}, None),
        Case("dies", "die_on", {"dying_rank": 0}, None),
        Case("hangs", "wait_forever", {}, None),
        Case("well", "give_values", {"factor": 1.0}, None),
    ]
    results = launch(2, CASES, cases, deadline=5.0)
    assert results["raises"].ranks[0].error is None
    assert "ValueError: the case failed on rank 1" in str(results["raises"].ranks[1].error)
    with pytest.raises(AssertionError, match="the case failed on rank 1"):
        results["raises"].values()
    assert "did not finish the case" in str(results["dies"].ranks[0].error)
    assert "wait_forever" in str(results["hangs"].ranks[0].error)
    assert "DEADLINE PASSED" in str(results["hangs"].ranks[1].error)
    assert results["well"].values()[1]["rank"] == 1


def test_a_rank_that_is_ended_while_it_asks_to_be_forked_ends_no_other() -> None:
    """The answer to it once ended the warm process, and every launch after it failed."""
    name = job.WARM.environment(dict(os.environ))[rank_main.WARM]
    asked = {"arguments": ["rank_main.py", SCRIPT], "environment": {}, "folder": str(ROOT)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(f"\0{name}")
        socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    assert pid(fresh=True) > 0


def pid(**options: Any) -> int:
    [value] = launch(1, CASES, [Case("pid", "say_pid", {}, None)], **options)["pid"].values()
    return value["pid"]


@pytest.mark.full
def test_launches_share_their_processes_until_one_fails_or_fresh_ones_are_asked_for() -> None:
    seen = [pid(), pid(), pid(fresh=True), pid()]
    launch(1, CASES, [Case("dies", "die_on", {"dying_rank": 0}, None)])
    seen += [pid()]
    assert seen[1] == seen[0]
    assert len(set(seen)) == 4


@pytest.mark.full
def test_of_the_processes_that_wait_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    POOLS.end()
    monkeypatch.setattr(pool, "MOST_RANKS", 2)
    some, other, third = ({"environment": {"WHICH": name}} for name in ("some", "other", "third"))
    first = pid(**some)
    pid(**other)
    assert pid(**some) == first
    pid(**third)
    assert pid(**some) == first
    assert POOLS.sizes() == [1, 1]


def test_what_a_case_leaves_behind_is_an_error_when_its_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    POOLS.end()
    launch(1, CASES, [Case("leaves", "leave_a_process", {}, None)])["leaves"].values()
    monkeypatch.setattr(pool, "SECONDS_TO_END", 4.0)
    with pytest.raises(AssertionError, match=r"(?s)that ran tests.distributed.cases.harness:.*left behind.*sleep 1000"):
        POOLS.end()


@pytest.mark.parametrize("cold", COLD)
def test_exit_codes_are_those_of_the_ranks(cold: bool) -> None:
    outcome = launch_script(2, SCRIPT, ["exit", "3"], deadline=30, cold=cold)
    assert outcome.returncode != 0
    assert outcome.exit_codes[1] == 3
    assert outcome.left_behind == []
    with pytest.raises(AssertionError, match="ranks exit"):
        outcome.expect_clean()


def test_a_deadline_prints_every_ranks_stack_and_kills_all() -> None:
    def pass_deadline(job: Job, line: Line) -> None:
        job.expires_at = time.monotonic() + 1.0

    waiting = on_marker("about to wait", pass_deadline, ranks={0, 1})
    outcome = launch_script(2, SCRIPT, ["hang"], deadline=300, on_line=waiting)
    assert outcome.timed_out
    assert outcome.seconds < 300
    for rank in range(2):
        assert "about to wait" in outcome.output(rank)
        assert "in wait_for_nothing" in outcome.output(rank)
    assert all(end is not None for end in outcome.ended_at)


@pytest.mark.parametrize("cold", COLD)
def test_a_signal_is_sent_when_ranks_print_a_marker(cold: bool) -> None:
    kill = on_marker("ready", lambda job, line: job.kill(1), ranks={0, 1})
    outcome = launch_script(2, SCRIPT, ["marker"], deadline=60, on_line=kill, cold=cold)
    assert outcome.exit_codes[1] == 128 + signal.SIGKILL
    assert outcome.exit_codes[0] in (None, 128 + signal.SIGTERM)
    assert outcome.ended_at[0] is not None
    assert not outcome.timed_out


@pytest.mark.parametrize("cold", COLD)
def test_the_launcher_can_be_killed(cold: bool) -> None:
    kill = on_marker("ready", lambda job, line: job.kill(LAUNCHER))
    outcome = launch_script(1, SCRIPT, ["marker"], deadline=60, on_line=kill, cold=cold)
    assert outcome.returncode == -signal.SIGKILL
    assert outcome.exit_codes == [None]


@pytest.mark.full
def test_a_forked_rank_ends_with_the_process_in_whose_place_it_is() -> None:
    kill = on_marker("ready", lambda job, line: job.kill(LAUNCHER))
    variables = {"HOROVOD_RANK": "0"}
    outcome = launch_script(1, SCRIPT, ["marker"], environment=variables, deadline=60, on_line=kill, launched=False)
    assert outcome.line_with("ready") is not None
    assert outcome.returncode == -signal.SIGKILL
    assert outcome.ended_at[0] is not None
    assert not outcome.timed_out


# What it leaves would be found by tests that run at the same time.
@pytest.mark.alone
def test_what_is_left_behind_is_found_and_processes_are_killed() -> None:
    outcome = launch_script(2, SCRIPT, ["leave"], deadline=60, patience=1)
    words = "\n".join(outcome.left_behind)
    assert "sleep 1000" in words
    assert "left.sock" in words
    [name] = [word for word in words.split() if "smp_harness_" in word]
    Path(name).unlink()
    [pid] = [int(thing.split()[1][:-1]) for thing in outcome.left_behind if "sleep" in thing]
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_one_process_needs_no_launcher() -> None:
    outcome = launch_script(1, "tests/distributed/scripts/no_launcher.py", launched=False)
    outcome.expect_clean()
    assert outcome.exit_codes == [0]
    assert outcome.output(0) == "no launcher"


def test_folders_of_jobs_are_deleted_at_the_end_unless_their_test_failed(tmp_path: Path) -> None:
    """Hundreds of them were once left in the temporary folder after a day."""
    well, failed = tmp_path / "well", tmp_path / "failed"
    for folder in (well, failed):
        (folder / "tmp").mkdir(parents=True)
    delete_folders(
        {"tests/test_a.py::test_b"}, [("tests/test_a.py::test_a", well), ("tests/test_a.py::test_b", failed)]
    )
    assert (well.exists(), failed.exists()) == (False, True)
    made = Job(1, Path(SCRIPT)).folder
    assert job._folders[-1] == (running_test(), made)
    assert running_test().endswith("test_folders_of_jobs_are_deleted_at_the_end_unless_their_test_failed")

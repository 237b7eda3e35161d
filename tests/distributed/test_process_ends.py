"""Whatever happens to a process, at whatever moment: its job goes on or ends in time, says why, and leaves nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.harness import LAUNCHER, Job, Line, Outcome, launch_script

SCRIPT = "tests/distributed/scripts/process_ends.py"
MOMENTS = ["init", "step", "save", "shutdown"]
# From the first rank's end to the last one's: what a failed process has to end by itself, and what the launcher gives
# those whom it ends.
SECONDS = 10.0

HARMLESS = [
    *(f"{way}@{moment}" for moment in MOMENTS for way in ("fork_and_exit", "fork_and_exec")),
    *(f"fill_disk@{moment}" for moment in ("step", "save", "shutdown")),
]


def run(folder: Path, *events: str, kill_unread: bool = False) -> Outcome:
    seen: set[str] = set()

    def kill_rank_0(job: Job, line: Line) -> None:
        seen.add(f"{line.rank} {line.text}")
        # One that is killed while UCX makes its shared memory leaves that behind.
        if seen >= {"1 @@ nobody reads it", "0 @@ has come to init"}:
            seen.clear()
            job.kill(0)

    on_line = kill_rank_0 if kill_unread else None
    outcome = launch_script(2, SCRIPT, [str(folder / "saved"), *events], deadline=120.0, on_line=on_line)
    assert not outcome.timed_out, outcome.report()
    assert outcome.left_behind == [], outcome.report()
    # TensorFlow leaves there the code of functions it has converted.
    left = [path for path in (outcome.folder / "tmp").rglob("*") if path.is_file()]
    temporary = [path for path in left if not path.name.startswith("__autograph_generated_file")]
    assert temporary == [], outcome.report()
    ends = [end for end in outcome.ended_at if end is not None]
    assert len(ends) == 2, outcome.report()
    assert max(ends) - min(ends) < SECONDS, outcome.report()
    return outcome


def told(outcome: Outcome, rank: int) -> list[str]:
    return [line.removeprefix("@@ ") for line in outcome.output(rank).splitlines() if line.startswith("@@ ")]


def test_children_and_full_disks_leave_a_job_alone(tmp_path: Path) -> None:
    outcome = run(tmp_path, *HARMLESS)
    assert outcome.returncode == 0, outcome.report()
    first, second = told(outcome, 0), told(outcome, 1)
    # One that a thread forks ends with that thread.
    assert [line for line in second if "child" in line] == [f"a child ended with {code}" for code in (5, 5, 0, 5)]
    assert second.count("a program ended with 6, another with 0") == 4, outcome.report()
    for said in (first, second):
        *_, error, saved, done = [
            line for line in said if " at " not in line and " come to " not in line and " ended with " not in line
        ]
        assert error == "CheckpointError: Checkpoint 'ckpt-1' could not be written:", outcome.report()
        assert (saved, done) == ("saved ckpt-2", "done"), outcome.report()
    assert re.search(r"^rank 1 \(host .*: .*File too large", outcome.output(0), re.M), outcome.report()
    # What the failed save wrote is not there any more.
    parts = {path.name.partition("-")[2][0] for path in (tmp_path / "saved").glob("mp_rank_*/*")}
    assert parts == {"2"}


#: What rank 0 says of rank 1, when that ends in a way after smp.init.
WORDS = {
    "interrupt": r"rank 1 \(host .*\) was ended by Ctrl-C$",
    "sys_exit": r"rank 1 \(host .*\) left the loop early after step \d",
    "fail_unread": r"rank 1 \(host .*\) failed: ValueError: not read",
    "os_exit": r"rank 1 \(host .*\) was lost: its process ended without a word",
}
#: And in it, where ranks do not know each other yet.
IN_INIT = (
    r"Rank 1 \(host .*\) ended while the ranks greeted each other|was ended by SIGTERM in smp.init: rank 1 \(host "
)


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", ["interrupt", "sys_exit", "os_exit", "fail_unread"])
def test_the_end_of_one_rank_ends_all_and_is_told(way: str, moment: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, f"{way}@{moment}")
    assert outcome.returncode != 0, outcome.report()
    words = IN_INIT if moment == "init" else WORDS[way]
    assert re.search(words, outcome.output(0), re.M), outcome.report()
    # The launcher may end it before, and does not always say how.
    codes = {"interrupt": {130, None}, "sys_exit": {3}, "os_exit": {3}, "fail_unread": {1, 143, None}}
    assert outcome.exit_codes[1] in codes[way], outcome.report()


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", ["block_stderr", "close_stderr"])
def test_a_rank_that_cannot_say_why_ends_as_well(way: str, moment: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, f"{way}@{moment}", kill_unread=True)
    assert outcome.returncode != 0, outcome.report()
    assert re.search(r"Process name: 0\nExit code: 137$", outcome.output(LAUNCHER), re.M), outcome.report()


@pytest.mark.full
def test_a_rank_without_room_for_shared_memory_says_so(tmp_path: Path) -> None:
    outcome = run(tmp_path, "fill_disk@horovod")
    assert outcome.returncode != 0
    assert re.search(IN_INIT, outcome.output(0), re.M), outcome.report()
    assert re.search(
        r"rank 1 could not open its transport: .+: Input/output error\. Is there room in /dev/shm\?", outcome.output(1)
    ), outcome.report()

"""Errors, never hangs: lost ranks, aborts, early leaving, stalls, signals, dead launchers."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.left_behind import shared_memory_files
from tests.full_only import params
from tests.ops.rank_fleet import ROOT, RankFleet, RankProcess

pytestmark = pytest.mark.large


def test_kill_9_ends_every_rank_with_one_message_that_names_it() -> None:
    with RankFleet("wait_in_step", 3, grace_s=1.0) as ranks:
        ranks.expect("ready")
        pids = [rank.pid for rank in ranks.ranks]
        os.kill(ranks[1].pid, signal.SIGKILL)
        error = ranks[0].expect("error", timeout=10)
        assert error["type"] == "PeerError"
        assert "rank 1 (host " in error["message"]
        # Neither ends by itself: rank 0 sits in a read after its error, rank 2 always did.
        for survivor in (ranks[0], ranks[2]):
            assert survivor.wait(timeout=10) == 1
            (line,) = survivor.messages()
            assert re.search(rf"rank 1 \(host \S+, process {pids[1]}\) was lost", line), line
            assert "in step 7" in line
        # Not of a semaphore of Python's, whose name is drawn: one once began with "sem.mp-eweaucx".
        assert [name for name in shared_memory_files() if "ucx" in name.lower()] == []
        segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        assert [s for s in segments if int(s.split()[4]) in pids] == []


def test_abort_reaches_all_with_the_first_cause_and_its_exit_code() -> None:
    with RankFleet("abort_on_command", 3, grace_s=0.5) as ranks:
        ranks.expect("ready")
        ranks.command_each("wait", "abort", "wait")
        for r in (0, 2):
            assert "the loss is not a number" in ranks[r].expect("error")["message"]
        causes = [told["cause"] for told in ranks.expect("cause")]
        assert causes[0] == causes[1] == causes[2]
        assert causes[0]["rank"] == 1
        assert causes[0]["message"] == "rank 1: ValueError: the loss is not a number\nin line 5\\x1b[2J"
        for rank in ranks.ranks:
            assert rank.wait(timeout=10) == 3
            (line,) = rank.messages()
            # A terminal shows it, and does not obey it.
            assert line.endswith("rank 1: ValueError: the loss is not a number in line 5\\x1b[2J")


def test_the_line_that_tells_a_cause_waits_for_a_traceback() -> None:
    """It was told when it became known, and again behind the traceback."""
    with RankFleet("hold_words", 3, grace_s=30.0) as ranks:
        ranks.expect("ready")
        ranks.command_each("wait", "abort", "wait")
        for r in (0, 2):
            ranks[r].expect("error")
        ranks.command_each("let go", "let go", "go on")
        told = "smp_tf: [rank {}] rank 1 has had enough"
        for r in (0, 1):
            lines = ranks[r].stderr_until("an end").splitlines()
            assert lines[-3:] == ["a traceback", told.format(r), "an end"]
        # One that a signal ends tells it before.
        os.kill(ranks[2].pid, signal.SIGTERM)
        ranks[2].wait(timeout=10)
        assert ranks[2].messages() == [told.format(2)]


def test_the_line_that_tells_a_cause_is_told_before_the_process_is_ended() -> None:
    with RankFleet("hold_words", 2, grace_s=0.5) as ranks:
        ranks.expect("ready")
        ranks.command_each("wait", "abort")
        for r, rank in enumerate(ranks.ranks):
            assert rank.wait(timeout=10) == 3
            assert rank.messages() == [f"smp_tf: [rank {r}] rank 1 has had enough"]


@pytest.mark.parametrize("how", ["receive", "send", "inside a step"])
def test_leaving_early_is_noticed_at_once(how: str) -> None:
    with RankFleet("leave_early", 2, grace_s=0.5) as ranks:
        ranks.expect("ready")
        ranks[0].command(how)
        ranks[0].expect("in step 5")
        ranks[1].command("leave")
        ranks[1].expect("left")
        if how == "send":
            # It is inside a step that rank 1 never began: the failure is there before the send.
            ranks[0].command("go on")
        if how != "inside a step":
            assert "left the loop early after step 4" in ranks[0].expect("error")["message"]
        assert ranks[0].wait(timeout=10) == 1
        (line,) = ranks[0].messages()
        assert "rank 1 (host" in line
        assert "left the loop early after step 4" in line


def test_a_step_that_averages_with_a_rank_that_has_left_is_an_error() -> None:
    """Horovod once noticed it, after 30 s: only a step that was under way at the goodbye was looked at."""
    with RankFleet("leave_between_steps", 2, grace_s=0.5) as ranks:
        ranks.expect("ready")
        ranks[1].command("leave")
        ranks[1].expect("left")
        ranks[0].command("go on")
        assert ranks[0].expect("evaluated")["cause"] is None
        ranks[0].command("go on")
        assert ranks[0].wait(timeout=10) == 1
        (line,) = ranks[0].messages()
        assert "left the loop early after step 4; rank 0 (host " in line
        assert "is in step 5. All ranks need as many batches: smp.shard_dataset gives every replica as many" in line


def test_a_rank_that_is_done_can_wait_for_the_others() -> None:
    with RankFleet("await_goodbyes", 3) as ranks:
        before = ranks[0].expect("before")
        assert (before["others"], before["itself"]) == (False, True)
        ranks[1].expect("ready")
        ranks[2].expect("ready")
        ranks[0].command("leave")
        ranks[1].command("leave")
        assert ranks[0].expect("one")["left"] is True
        os.kill(ranks[2].pid, signal.SIGKILL)
        assert ranks[0].expect("all")["left"] is True


def test_a_thread_can_wait_for_a_step() -> None:
    with RankFleet("await_steps", 1) as ranks:
        [rank] = ranks.ranks
        for reached in ([False, False], [False, False], [True, False], [True, True], [True, True]):
            assert rank.expect("now")["reached"] == reached
        assert rank.expect("thread")["found"] == [True, True, True, False]


def test_leaving_in_order_disturbs_nobody() -> None:
    with RankFleet("leave_in_order", 2) as ranks:
        ranks[0].expect("ready")
        assert ranks[1].wait(timeout=20) == 0
        ranks[0].command("go on")
        assert ranks[0].expect("got")["data"] == "the last word"
        assert ranks[0].wait(timeout=20) == 0
        assert ranks[0].messages() == ranks[1].messages() == []


def test_a_stall_is_reported_once_and_the_job_goes_on() -> None:
    with RankFleet("stall", 2, stall_report_s=0.7) as ranks:
        ranks.expect("ready")
        ranks[0].command("wait")
        text = ranks[0].stderr_until("The job goes on", timeout=20)
        ranks[1].command("send")
        assert ranks[0].expect("got")["data"] == "late"
        assert "rank 0 (host" in text
        assert "receive of 'recv_bytes'" in text
        assert "Rank 1 is alive and has been in step 2 for" in text
        assert "doing 'writing a checkpoint'" in text
        os.kill(ranks[0].pid, signal.SIGKILL)
        assert len(ranks[0].messages()) == 1


def test_a_stopped_peer_is_reported_without_its_answer() -> None:
    with RankFleet("stall", 2, stall_report_s=0.5) as ranks:
        ranks.expect("ready")
        os.kill(ranks[1].pid, signal.SIGSTOP)
        ranks[0].command("wait")
        text = ranks[0].stderr_until("The job goes on", timeout=20)
        assert "Rank 1 does not answer: its process is stopped" in text
        assert ranks[0].process.poll() is None


def test_a_message_that_is_on_its_way_when_a_receive_is_given_up_comes_to_the_next() -> None:
    """It was once dropped, and every later one taken for the one before it."""
    with RankFleet("give_up_half_way", 2, read_memory=False) as ranks:
        assert "not done within 0.0 s" in ranks[0].expect("error")["message"]
        ranks[0].expect("gave up")
        ranks[1].command("send")
        ranks[0].expect("there")
        os.kill(ranks[1].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED)
        ranks[0].command("receive")
        for _ in range(2):
            assert ranks[0].expect("error")["type"] == "TransportTimeoutError"
        ranks[0].expect("gave up again")
        os.kill(ranks[1].pid, signal.SIGCONT)
        got = ranks[0].expect("got")
        assert (got["right"], got["then"]) == (True, "the next one")


def test_a_rank_answers_what_it_does_while_its_main_thread_is_stuck() -> None:
    with RankFleet("answer_while_stuck", 2) as ranks:
        before = ranks[0].expect("before")["status"]
        assert (before["rank"], before["in_step"], before["step"], before["waits"]) == (1, False, -1, [])
        ranks[1].command("begin")
        ranks[1].expect("in step")
        ranks[0].command("ask")
        told = ranks[0].expect("stuck")
        assert (told["own"]["rank"], told["own"]["in_step"]) == (0, False)
        status = told["status"]
        assert (status["in_step"], status["program"], status["step"]) == (True, 1, 7)
        assert status["activity"] == 'about to "wait"'
        (wait,) = status["waits"]
        assert (wait["peer"], wait["is_send"], wait["label"]) == (0, False, "recv_bytes")
        assert 0 <= wait["seconds"] <= status["step_seconds"] + 0.1
        assert ranks[1].expect("got")["data"] == "at last"
        ranks[1].expect("out of step")
        ranks[0].command("ask")
        free = ranks[0].expect("free")["status"]
        assert (free["in_step"], free["step"], free["activity"], free["waits"]) == (False, 7, "", [])
        os.kill(ranks[1].pid, signal.SIGSTOP)
        # Until all of its threads have stopped, one of them may still answer.
        os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED)
        ranks[0].command("ask")
        assert ranks[0].expect("stopped")["status"] is None


def test_stall_timeout_is_an_error() -> None:
    with RankFleet("stall", 2, stall_timeout_s=1.0, grace_s=0.5) as ranks:
        ranks.expect("ready")
        ranks[0].command("wait")
        message = ranks[0].expect("error", timeout=20)["message"]
        assert "gave up in step 2 after stall_timeout = 1 s" in message
        assert ranks[0].wait(timeout=10) == ranks[1].wait(timeout=10) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_all(number: signal.Signals) -> None:
    with RankFleet("wait_in_step", 3, grace_s=1.0) as ranks:
        ranks.expect("ready")
        os.kill(ranks[2].pid, number)
        assert number.name in ranks[0].expect("error", timeout=10)["message"]
        ends = [rank.wait(timeout=10) for rank in ranks.ranks]
        assert ends[0] == ends[1] == 128 + number
        assert ends[2] in (-number, 128 + number)
        (line,) = ranks[1].messages()
        assert "rank 2 (host" in line
        assert f"was ended by {number.name}" in line


def test_a_dead_launcher_ends_its_ranks() -> None:
    launcher = (
        "import os, subprocess, sys\n"
        "from tests.ops.rank_fleet import RankFleet\n"
        "ranks = RankFleet('wait_in_step', 2, grace_s=0.5)\n"
        "ranks.expect('ready')\n"
        "print(*[rank.pid for rank in ranks.ranks], flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launcher],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    ends = [os.pidfd_open(pid) for pid in pids]
    process.kill()
    process.communicate()
    alive = []
    for pid, end in zip(pids, ends, strict=True):
        if not select.select([end], [], [], 10)[0]:
            alive.append(pid)
            os.kill(pid, signal.SIGKILL)
        os.close(end)
    assert len(pids) == 2
    assert alive == []


def test_without_the_secret_nobody_connects() -> None:
    with RankFleet("wait_in_step", 2, connect=False, per_rank={1: {"secret": "not the secret of this job"}}) as ranks:
        told = ranks[0].expect("not connected", timeout=30)
        assert "rank 0 waits for rank 1 (host" in told["message"]
        assert "prove the job's secret" in told["message"]
        # What comes before a rank has begun to connect is dropped without a word. One of the two has refused the other.
        refusing, text = RankProcess.stderr_of_any(ranks.ranks, "refused")
        assert f"refused a message that claims to come from rank {1 - refusing}" in text
        ranks[1].expect("not connected", timeout=30)


@pytest.mark.parametrize(
    "reads",
    [(True, True), *(pytest.param(each, marks=pytest.mark.full) for each in ((False, False), (True, False)))],
    ids=["both", "none", "one"],
)
def test_messages_lanes_and_idle_cost(reads: tuple[bool, bool]) -> None:
    per_rank = {r: {"read_memory": it_does} for r, it_does in enumerate(reads)}
    with RankFleet("bytes_both_ways", 2, per_rank=per_rank) as ranks:
        for rank in ranks.ranks:
            assert rank.expect("order")["right"]
            assert rank.expect("error")["type"] == "TransportTimeoutError"
        assert ranks[1].expect("big")["right"]
        for r, rank in enumerate(ranks.ranks):
            assert rank.expect("error")["type"] == "TransportTimeoutError"
            # In 2 s, while a receive waits: the thread sleeps, but for a look after it every half second. Where cores
            # are spare it goes on looking for 20 us after a message.
            assert rank.expect("idle")["rounds"] < 500
            told = rank.expect("stats")
            assert told["lanes"]
            assert set(told["lanes"]) <= {"posix", "sysv"}
            peer = told["stats"]["peers"][1 - r]
            assert peer["reads_memory"] is reads[r]
            assert peer["sent_messages"] == (21 if r == 0 else 20)
            assert peer["received_messages"] == (20 if r == 0 else 21)
            assert peer["sent_bytes"] == sum(range(20)) + ((64 << 20) if r == 0 else 0)
            assert told["stats"]["refused_messages"] == 0
            assert rank.expect("network")["sockets"] == []
        ranks.command("leave")
        assert [rank.wait(timeout=10) for rank in ranks.ranks] == [0, 0]
        assert ranks[0].messages() == ranks[1].messages() == []


@pytest.mark.parametrize("reads", params([True, False], [False]))
def test_what_a_killed_rank_offered_is_not_waited_for(reads: bool) -> None:
    """A tensor lies in its sender's memory until it is taken: with the sender it is gone."""
    with RankFleet("offer", 2, grace_s=3.0, read_memory=reads) as ranks:
        ranks[0].expect("there")
        os.kill(ranks[1].pid, signal.SIGKILL)
        # Until it has ended its memory is there, and what it offered may be had whole.
        ranks[1].wait(timeout=10)
        ranks[0].command("receive")
        assert "was lost" in ranks[0].expect("error", timeout=10)["message"]
        assert ranks[0].wait(timeout=10) == 1
        (line,) = ranks[0].messages()
        assert "rank 1 (host" in line


@pytest.mark.parametrize("reads", params([True, False], [True]))
def test_what_was_offered_to_a_killed_rank_ends(reads: bool) -> None:
    with RankFleet("offer", 2, grace_s=1.0, read_memory=reads) as ranks:
        ranks[0].expect("there")
        os.kill(ranks[0].pid, signal.SIGKILL)
        assert "rank 0 (host" in ranks[1].expect("error", timeout=10)["message"]
        assert ranks[1].wait(timeout=10) == 1


def test_what_a_closed_transport_had_offered_is_not_read() -> None:
    """Its memory is there, with something else in it perhaps: the guard says so."""
    with RankFleet("offer", 2, grace_s=1.0) as ranks:
        ranks[0].expect("there")
        ranks[1].command("close")
        assert "was shut down" in ranks[1].expect("error")["message"]
        ranks[1].expect("closed")
        ranks[0].command("receive")
        assert "the sender has ended its send" in ranks[0].expect("error", timeout=10)["message"]


def test_what_a_rank_had_offered_that_left_is_told_as_its_leaving() -> None:
    with RankFleet("offer", 2, grace_s=1.0) as ranks:
        ranks[0].expect("there")
        ranks[1].command("goodbye and close")
        ranks[1].expect("error")
        ranks[1].expect("closed")
        ranks[0].command("receive")
        assert "left the loop early" in ranks[0].expect("error", timeout=10)["message"]


@pytest.mark.parametrize(("how", "words"), [("goodbye", "left the loop early"), ("close", "refused by the receiver")])
def test_a_sender_hears_that_its_receiver_will_not_take_what_it_offers(how: str, words: str) -> None:
    """It once waited for as long as the receiver's process lived."""
    with RankFleet("offer", 2, grace_s=1.0) as ranks:
        ranks[0].expect("there")
        ranks[0].command(how)
        ranks[0].expect("closed")
        assert words in ranks[1].expect("error", timeout=10)["message"]


def test_what_cannot_be_read_after_all_is_sent() -> None:
    """The receiver once ended with an error, and the sender waited."""
    with RankFleet("send_unreadable", 2) as ranks:
        without = ranks[1].expect("sent")["without"]
        if without is not None:
            pytest.skip(f"this kernel makes no memory that it shows to nobody else: {without}")
        assert ranks[0].expect("got")["right"]
        assert ranks[0].expect("got")["right"]
        said = ranks[0].stderr_until("from here on.\n")
        assert said.count("cannot read the memory of rank 1 any more (Bad address)") == 1, said


def test_a_rank_whose_stderr_nobody_reads_answers_and_ends() -> None:
    """A line about a wait once stopped its transport, and the line that tells the cause kept it from ending."""
    full = {1: "blocking", 2: "nonblocking"}
    with RankFleet("stall_unread", 3, full_pipes=full, stall_report_s=0.1, grace_s=0.5) as ranks:
        ranks.expect("ready")
        assert ranks[0].expect("error")["type"] == "TransportTimeoutError"
        assert ranks[0].expect("asked")["answers"] == [True, True]
        os.kill(ranks[0].pid, signal.SIGKILL)
        for rank in (ranks[1], ranks[2]):
            assert "rank 0 (host " in rank.expect("error")["message"]
        assert [rank.wait(timeout=10) for rank in (ranks[1], ranks[2])] == [1, 1]


def test_a_child_that_ends_in_order_leaves_its_rank_alone() -> None:
    """It said goodbye for its rank. And what a rank had received was freed before it was read for the last time."""
    with RankFleet("fork_and_exit", 2) as ranks:
        for code in (0, 7):
            error = ranks[1].expect("error")
            assert error["type"] == "TransportError"
            assert re.match(r"this process, \d+, was forked from rank 1 and is no rank itself: ", error["message"])
            assert ranks[1].expect("at exit")["right"]
            assert ranks[1].expect("child")["code"] == code
        for rank in ranks.ranks:
            assert rank.expect("stats")["refused"] == 0
        assert ranks[0].expect("error")["message"] == "the transport of rank 0 is closed"
        for rank in ranks.ranks:
            assert rank.expect("at exit")["right"]
            assert rank.wait(timeout=10) == 0
            assert rank.messages() == []

"""A start says which ranks it waits for, and ends when one keeps the others waiting for too long."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from smp_tf.ops.errors import PeerError
from smp_tf.start import arrivals
from smp_tf.start.start_watch import StartWatch
from smp_tf.watch import exception_hooks
from tests.smp_tf.rendezvous import Rendezvous, arrive, ended_process, running

HOST = socket.gethostname()
NOBODY = {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}


@pytest.fixture
def two_of_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    """A launcher of four ranks, of which rank 2 has come to its first start on another host."""
    monkeypatch.setattr(arrivals, "_starts", itertools.repeat(1))
    with running() as launcher:
        arrive(launcher.environment(2, 4, 0, 2), host="b", machine="b", pid=7)
        yield launcher


def test_a_start_that_takes_too_long_is_told_of_and_ended(
    two_of_four: Rendezvous, capfd: pytest.CaptureFixture[str]
) -> None:
    """It once ended after 30 s with words of Horovod's."""
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    watch = StartWatch(0.25, two_of_four.environment(0, 4, 0, 2), patience=0.0, end=end)
    watch.await_those_missing()
    with watch:
        assert ended.wait(20.0)
    assert codes == [1]
    report, last = capfd.readouterr().err.splitlines()
    missing = f"rank 1 (host {socket.gethostname()}), rank 3 (host b), which have not come to it."
    assert report == (
        f"smp_tf: rank 0 has waited 0 s in smp.init for {missing} The job goes on; it ends after stall_timeout = "
        "0.25 s."
    )
    assert last == (
        f"smp_tf: rank 0 gave up in smp.init after stall_timeout = 0.25 s: it waited for {missing} "
        "Every rank must call smp.init; a rank that only needs longer until then gets it with a larger "
        "stall_timeout."
    )


def test_what_is_waited_for_later_is_told_in_place_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()
    with StartWatch(0.1, NOBODY, end=lambda _: ended.set()) as watch:
        watch.await_others(lambda: "rank 0 to connect")
        assert ended.wait(20.0)
    said = capfd.readouterr().err
    assert "rank 1 gave up in smp.init after stall_timeout = 0.1 s: it waited for rank 0 to connect. " in said


def test_another_beginning_is_a_sign_of_life(capfd: pytest.CaptureFixture[str]) -> None:
    """Time was counted from the begin of smp.init, as if a slow start of Horovod's were a wait for other ranks."""
    codes: list[int] = []
    with StartWatch(3600.0, NOBODY, patience=0.0, end=codes.append) as watch:
        first = watch._begun
        watch.await_others(lambda: "rank 0 to connect")
        assert watch._begun > first
    assert codes == []


def test_a_start_in_time_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with StartWatch(1800.0, {"HOROVOD_SIZE": "2"}):
        pass
    with StartWatch(0.0, {}):
        pass
    assert capfd.readouterr().err == ""


def test_a_launcher_that_does_not_answer_is_waited_for_without_a_name(capfd: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()
    environment = {**NOBODY, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}
    with StartWatch(0.1, environment, end=lambda _: ended.set()) as watch:
        watch.await_those_missing()
        assert ended.wait(20.0)
    assert "it waited for other ranks. Every rank must" in capfd.readouterr().err


def test_a_start_is_ended_also_where_no_words_are_found_for_whom_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    """The thread that ends it ended itself, and smp.init waited for ever."""
    ended = threading.Event()
    with StartWatch(0.1, NOBODY, end=lambda _: ended.set()) as watch:
        watch.await_others(lambda: str(1 // 0))
        assert ended.wait(20.0)
    assert "it waited for other ranks; which ones could not be found out (ZeroDivisionError" in capfd.readouterr().err


def test_a_start_that_fails_unread_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others waited for it in Horovod until stall_timeout."""
    monkeypatch.setattr(exception_hooks, "_PRINTING_TIME", 0.05)
    monkeypatch.setattr(exception_hooks, "has_room", lambda stream: False)
    codes: list[int] = []
    ended = threading.Event()
    # As if Python printed to a pipe that is full.
    monkeypatch.setattr(sys, "excepthook", lambda *_: ended.wait(20.0))

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with pytest.raises(ValueError, match="of a configuration") as caught, StartWatch(1800.0, NOBODY, end=end):
        raise ValueError("of a configuration")
    other = KeyError("of the script, which has caught the first")
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    ended.set()
    sys.excepthook(KeyError, other, None)
    assert codes == []
    ended.clear()
    sys.excepthook(ValueError, caught.value, None)
    assert codes == [1]


def test_where_no_signal_is_heard_the_end_of_another_rank_is_told_before_python_prints_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The launcher's signal ended the process before it did."""
    with pytest.raises(PeerError, match="Rank 0 ended"), StartWatch(1800.0, NOBODY):
        raise PeerError("Rank 0 ended.")
    assert capfd.readouterr().err == f"smp_tf: rank 1 (host {HOST}) ends in smp.init: Rank 0 ended.\n"


class Started:
    """A process in its start.

    Args:
        environment: of the rank.
        body: what it does there; it has said that it is there.
        before: what it does before.
        after: what it does afterwards.
        watch: more arguments of the watch over the start.
        options: of the process.
    """

    def __init__(
        self,
        environment: dict[str, str],
        body: str,
        before: str = "",
        after: str = "",
        watch: str = "1800.0",
        **options: Any,
    ) -> None:
        script = f"""
import ctypes, os, signal, sys, threading
from smp_tf.ops.errors import PeerError
from smp_tf.start import start_watch
from smp_tf.start.start_watch import StartWatch
{before}
with StartWatch({watch}, environment={environment!r}) as watch:
    watch.await_those_missing()
    print("there", flush=True)
    {body}
{after}
"""
        given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", script], **{**given, **options})
        self.await_line()

    def await_line(self) -> None:
        """Waits until the process has said something."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), self.process.communicate()

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """How it ends by a signal: its status, and what it says."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """How it ends when it can."""
        _, said = self.process.communicate(timeout=30.0)
        return self.process.returncode, said


ENDED = f"smp_tf: rank 0 (host {HOST}) was ended by SIGTERM in smp.init"
# For what never comes.
WAIT = "threading.Event().wait()"


@pytest.mark.parametrize("launched", [False, True])
def test_a_stall_timeout_of_years_is_waited_for(launched: bool, two_of_four: Rendezvous) -> None:
    """It was more than a clock can count, and ended the start at once."""
    environment = two_of_four.environment(0, 3, 0, 2) if launched else NOBODY
    started = Started(environment, "sys.stdin.read()", watch="1e10, patience=0.0")
    assert started.process.stderr is not None
    goes_on = "The job goes on; it ends after stall_timeout = 1e+10 s."
    assert goes_on in started.process.stderr.readline()
    status, said = started.ended()
    # Once more where the watch ran before the script said what it waits for.
    assert status == 0, said
    assert all(goes_on in line for line in said.splitlines()), said


class TestSigterm:
    """The launcher sends it to those that are left when a rank has ended."""

    def test_who_is_ended_says_who_has_not_come(self, two_of_four: Rendezvous) -> None:
        started = Started(two_of_four.environment(0, 3, 0, 2), WAIT)
        words = f"{ENDED}: it waited for rank 1 (host {HOST}), which has not come to it.\n"
        assert started.end() == (-signal.SIGTERM, words)

    def test_who_is_ended_says_whose_process_has_ended(self, two_of_four: Rendezvous) -> None:
        pid = ended_process()
        arrive(two_of_four.environment(1, 4, 1, 2), pid=pid)
        started = Started(two_of_four.environment(0, 4, 0, 2), WAIT)
        assert started.end() == (-signal.SIGTERM, f"{ENDED}: rank 1 (host {HOST}, pid {pid}) had ended.\n")

    def test_who_ended_for_another_is_not_the_cause(self, two_of_four: Rendezvous) -> None:
        """The launcher ends all that are left, and the first of them was named by the others."""
        process = {**arrivals.this_process(), "pid": ended_process()}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(arrivals, "this_process", lambda: process)
            arrivals.Arrivals(two_of_four.environment(1, 2, 1, 2)).whose_end()
        assert Started(two_of_four.environment(0, 2, 0, 2), WAIT).end() == (-signal.SIGTERM, f"{ENDED}.\n")

    def test_who_has_no_words_in_time_ends_without(self, two_of_four: Rendezvous) -> None:
        """Native code may hold Python's lock for long."""
        # Of all that waits a lock alone goes on when a signal has come.
        twice = "mutex, c = ctypes.create_string_buffer(64), ctypes.PyDLL(None); "
        twice += "[c.pthread_mutex_lock(mutex) for _ in range(2)]"
        started = Started(two_of_four.environment(0, 3, 0, 2), twice)
        assert started.end() == (-signal.SIGTERM, f"{ENDED}.\n")

    def test_who_cannot_say_it_ends(self, two_of_four: Rendezvous) -> None:
        heard, said = os.pipe()
        started = Started(two_of_four.environment(0, 3, 0, 2), WAIT, stderr=said)
        os.close(heard)
        os.close(said)
        assert started.end()[0] == -signal.SIGTERM

    def test_other_signals_are_the_script_s(self, two_of_four: Rendezvous) -> None:
        """They were taken for an end of the time that a rank may wait."""
        heard = "signal.signal(signal.SIGUSR1, lambda *_: print('heard', flush=True))"
        started = Started(two_of_four.environment(0, 3, 0, 2), "sys.stdin.read()", before=heard)
        for _ in range(3):
            started.process.send_signal(signal.SIGUSR1)
            started.await_line()
        assert started.ended() == (0, "")

    def test_a_script_that_ends_in_a_way_of_its_own_does(self, two_of_four: Rendezvous) -> None:
        before = "signal.signal(signal.SIGTERM, lambda *_: os._exit(3))"
        assert Started(two_of_four.environment(0, 3, 0, 2), WAIT, before=before).end() == (3, "")

    def test_a_forked_child_ends_alone(self, two_of_four: Rendezvous) -> None:
        """Its end was taken for its parent's."""
        body = "; ".join(
            [
                "child = os.fork()",
                "child or signal.pause()",
                "os.kill(child, signal.SIGTERM)",
                "ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])",
                "sys.stdin.read()",
            ]
        )
        started = Started(two_of_four.environment(0, 3, 0, 2), body, after="sys.exit(-ended)")
        assert started.ended() == (signal.SIGTERM, "")

    def test_a_forked_child_may_leave_the_start(self, two_of_four: Rendezvous) -> None:
        """It waited for a thread that its parent has."""
        body = "child = os.fork()"
        after = "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 7)"
        assert Started(two_of_four.environment(0, 3, 0, 2), body, after=after).ended() == (7, "")

    @pytest.mark.parametrize("then", ["pass", "os.sched_yield()"])
    def test_a_signal_at_the_end_of_a_start_is_not_lost(self, two_of_four: Rendezvous, then: str) -> None:
        """What came just before was dropped, and the process lived on."""
        body = f"os.kill(os.getpid(), signal.SIGTERM); {then}"
        started = Started(two_of_four.environment(0, 3, 0, 2), body, after="print('over', flush=True)")
        assert started.ended()[0] == -signal.SIGTERM

    def test_afterwards_signals_are_as_they_were(self, two_of_four: Rendezvous) -> None:
        after = f"print('over', flush=True); {WAIT}"
        started = Started(two_of_four.environment(0, 3, 0, 2), "pass", after=after)
        started.await_line()
        assert started.end() == (-signal.SIGTERM, "")


class TestError:
    """A rank that hears of another's end through Horovod has an error to print, and the same signal on its way."""

    FAIL = "raise PeerError('Rank 1 ended.')"

    def test_an_error_that_is_printed_has_told_the_cause(self, two_of_four: Rendezvous) -> None:
        """It was told on a line of its own before."""
        status, said = Started(two_of_four.environment(0, 4, 0, 2), self.FAIL).ended()
        assert status == 1
        assert said.endswith("PeerError: Rank 1 ended.\n")
        assert said.count("Rank 1 ended.\n") == 1, said

    @pytest.mark.parametrize("thread", [False, True])
    def test_a_signal_that_comes_before_it_is_printed_tells_the_cause(
        self, thread: bool, two_of_four: Rendezvous
    ) -> None:
        """It ended the process without a word."""
        environment = two_of_four.environment(0, 4, 0, 2)
        before = f"never = lambda *_: (os.kill(os.getpid(), signal.SIGTERM), {WAIT})\n"
        before += "sys.excepthook = threading.excepthook = never\n"
        if thread:
            before += f"def start():\n  with StartWatch(1800.0, environment={environment!r}):\n    {self.FAIL}\n"
            before += f"threading.Thread(target=start).start(); print('there', flush=True); {WAIT}"
        status, said = Started(environment, self.FAIL, before=before).ended()
        assert (status, said) == (-signal.SIGTERM, f"{ENDED}: Rank 1 ended.\n")

    def test_another_error_that_is_printed_is_not_that_one(self, two_of_four: Rendezvous) -> None:
        """The start was left, and the launcher's signal ended the process without a word."""
        before = "sys.excepthook = lambda *_: (other(), os.kill(os.getpid(), signal.SIGTERM), signal.pause())\n"
        before += "threading.excepthook = lambda *_: None\n"
        before += "def other():\n  thread = threading.Thread(target=lambda: 1 // 0); thread.start(); thread.join()"
        status, said = Started(two_of_four.environment(0, 4, 0, 2), self.FAIL, before=before).ended()
        assert (status, said) == (-signal.SIGTERM, f"{ENDED}: Rank 1 ended.\n")

    def test_an_error_that_follows_from_it_has_told_the_cause(self, two_of_four: Rendezvous) -> None:
        environment = two_of_four.environment(0, 4, 0, 2)
        after = f"try:\n  with StartWatch(1800.0, environment={environment!r}):\n    {self.FAIL}\n"
        after += "except PeerError as error:\n  raise RuntimeError('no start') from error"
        status, said = Started(environment, "pass", after=after).ended()
        assert status == 1
        assert said.count("Rank 1 ended.\n") == 1, said
        assert said.endswith("RuntimeError: no start\n")

    def test_without_an_output_it_is_printed_once(self, two_of_four: Rendezvous) -> None:
        body = f"sys.stdout = None\n    {self.FAIL}"
        status, said = Started(two_of_four.environment(0, 4, 0, 2), body).ended()
        assert (status, said.count("Rank 1 ended.\n")) == (1, 1), said

    @pytest.mark.parametrize("how", ["at once", "later", "with another start"])
    def test_whoever_catches_it_has_its_signals_again(self, how: str, two_of_four: Rendezvous) -> None:
        environment = two_of_four.environment(0, 4, 0, 2)
        body = f"sys.stdout.flush()\ntry:\n  with StartWatch(1800.0, environment={environment!r}):\n    {self.FAIL}"
        body += "\nexcept PeerError:\n  pass\n"
        before = f"start_watch._PRINTING_TIME = {0.05 if how == 'later' else 3600.0}"
        if how == "at once":
            body += "start_watch._unprinted.leave()\n"
        if how == "later":
            body += "start_watch._unprinted._timer.join()\n"
        if how == "with another start":
            body += f"with StartWatch(1800.0, environment={environment!r}):\n  pass\n"
        body += "print('over', flush=True)\n" + WAIT
        started = Started(environment, "pass", before=before, after=body)
        started.await_line()
        assert started.end() == (-signal.SIGTERM, "")

    def test_a_script_that_catches_it_may_end_as_it_likes(self, two_of_four: Rendezvous) -> None:
        environment = two_of_four.environment(0, 4, 0, 2)
        after = f"try:\n  with StartWatch(1800.0, environment={environment!r}):\n    {self.FAIL}"
        after += "\nexcept PeerError:\n  sys.exit(5)"
        assert Started(environment, "pass", after=after).ended() == (5, "")

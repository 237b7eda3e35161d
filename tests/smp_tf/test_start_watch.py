"""A start says which ranks it waits for, and ends when one keeps the others waiting for too long."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from smp_tf import arrivals
from smp_tf.start_watch import StartWatch
from tests.smp_tf.rendezvous import Rendezvous, running


@pytest.fixture
def two_of_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    """A launcher of four ranks, of which rank 2 has come to its first start on another host."""
    monkeypatch.setattr(arrivals, "_starts", itertools.repeat(1))
    with running() as launcher:
        with monkeypatch.context() as patched:
            patched.setattr(arrivals, "this_process", lambda: {"host": "b", "machine": "b", "pid": 7})
            arrivals.Arrivals(launcher.environment(2, 4, 0, 2)).enter()
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
    watch.meet_in_horovod()
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
    with StartWatch(0.1, {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, end=lambda _: ended.set()) as watch:
        watch.await_others(lambda: "rank 0 to connect")
        assert ended.wait(20.0)
    said = capfd.readouterr().err
    assert "rank 1 gave up in smp.init after stall_timeout = 0.1 s: it waited for rank 0 to connect. " in said


def test_another_beginning_is_a_sign_of_life(capfd: pytest.CaptureFixture[str]) -> None:
    """Time was counted from the begin of smp.init, as if a slow start of Horovod's were a wait for other ranks."""
    codes: list[int] = []
    with StartWatch(3600.0, {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, patience=0.0, end=codes.append) as watch:
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


class TestSigterm:
    """The launcher sends it to those that are left when a rank has ended."""

    def end_by_it(self, environment: dict[str, str]) -> list[int]:
        codes: list[int] = []
        ended = threading.Event()
        with StartWatch(1800.0, environment, end=lambda code: (codes.append(code), ended.set())) as watch:
            watch.meet_in_horovod()
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended.wait(20.0)
        return codes

    def test_who_is_ended_says_who_has_not_come(
        self, two_of_four: Rendezvous, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert self.end_by_it(two_of_four.environment(0, 3, 0, 2)) == [128 + signal.SIGTERM]
        host = socket.gethostname()
        assert capfd.readouterr().err == (
            f"smp_tf: rank 0 (host {host}) was ended by SIGTERM in smp.init: it waited for rank 1 (host {host}), which "
            "has not come to it.\n"
        )

    def test_who_is_ended_says_whose_process_has_ended(
        self, two_of_four: Rendezvous, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            arrivals.Arrivals, "lost", lambda self: ["rank 1 (host a, pid 5)", "rank 2 (host a, pid 6)"]
        )
        self.end_by_it(two_of_four.environment(0, 3, 0, 2))
        assert capfd.readouterr().err == (
            f"smp_tf: rank 0 (host {socket.gethostname()}) was ended by SIGTERM in smp.init: "
            "rank 1 (host a, pid 5) and rank 2 (host a, pid 6) ended there.\n"
        )

    def test_afterwards_it_is_as_it_was(self) -> None:
        with StartWatch(1800.0, {"HOROVOD_SIZE": "2"}):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1

    def test_a_script_with_a_way_of_its_own_to_end_keeps_it(self) -> None:
        numbers: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
        try:
            with StartWatch(1800.0, {"HOROVOD_SIZE": "2"}, end=numbers.append):
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert numbers == [signal.SIGTERM]

    def test_a_script_that_hears_signals_through_a_pipe_keeps_it(self) -> None:
        heard, to_hear = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(to_hear)
        try:
            with StartWatch(1800.0, {"HOROVOD_SIZE": "2"}):
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        finally:
            assert signal.set_wakeup_fd(-1) == to_hear
            os.close(heard)
            os.close(to_hear)

    def test_a_start_beside_the_main_thread_leaves_signals_alone(self) -> None:
        found: list[object] = []

        def start() -> None:
            with StartWatch(1800.0, {"HOROVOD_SIZE": "2"}):
                found.append(signal.getsignal(signal.SIGTERM))

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        assert found == [signal.SIG_DFL]

"""A start says which ranks it waits for, and ends when one keeps the others waiting for too long."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from smp_tf.start_watch import StartWatch, missing_ranks, others_in_words


class Rendezvous:
    """A launcher of some ranks, some of which have come."""

    def __init__(self, size: int, came: set[int]) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _, scope, rank = self.path.split("/")
                self.send_response(200 if scope == "global" and int(rank) in came else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.environment = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.server_port),
            "HOROVOD_RANK": "0",
            "HOROVOD_SIZE": str(size),
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def two_of_four() -> Iterator[Rendezvous]:
    launcher = Rendezvous(4, {0, 2})
    yield launcher
    launcher.close()


def test_the_launcher_knows_who_has_not_come(two_of_four: Rendezvous) -> None:
    assert missing_ranks(two_of_four.environment) == [1, 3]


def test_when_all_have_come_and_gone_on_nobody_is_missing(two_of_four: Rendezvous) -> None:
    assert missing_ranks({**two_of_four.environment, "HOROVOD_RANK": "1"}) is None


def test_without_a_launcher_to_ask_nobody_is_known_to_be_missing(two_of_four: Rendezvous) -> None:
    assert missing_ranks({"OMPI_COMM_WORLD_SIZE": "4"}) is None
    two_of_four.close()
    assert missing_ranks(two_of_four.environment) is None


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (None, "other ranks"),
        ([], "other ranks"),
        ([1], "rank 1, which has not come to it"),
        ([1, 3], "ranks 1, 3, which have not come to it"),
        ([1, 2, 3, 4], "ranks 1, 2, 3, 4 and others, which have not come to it"),
    ],
)
def test_whom_it_waits_for_in_words(missing: list[int] | None, words: str) -> None:
    assert others_in_words(missing) == words


def test_a_start_that_takes_too_long_is_told_of_and_ended(
    two_of_four: Rendezvous, capfd: pytest.CaptureFixture[str]
) -> None:
    """It once ended after 30 s with words of Horovod's."""
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    watch = StartWatch(0.25, two_of_four.environment, patience=0.0, end=end)
    watch.await_those_missing()
    with watch:
        assert ended.wait(20.0)
    assert codes == [1]
    report, last = capfd.readouterr().err.splitlines()
    assert report == (
        "smp_tf: rank 0 has waited 0 s in smp.init for ranks 1, 3, which have not come to it. The job goes on; it ends "
        "after stall_timeout = 0.25 s."
    )
    assert last == (
        "smp_tf: rank 0 gave up in smp.init after stall_timeout = 0.25 s: it waited for ranks 1, 3, which have not "
        "come to it. Every rank must call smp.init; a rank that only needs longer until then gets it with a larger "
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

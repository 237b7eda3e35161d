"""Who has come to a start, and who has ended since, is known from what each leaves with the launcher."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from smp_tf.start import arrivals
from smp_tf.start.arrivals import Arrivals
from tests.smp_tf.rendezvous import Rendezvous, arrive, ended_process, running


@pytest.fixture
def launcher() -> Iterator[Rendezvous]:
    with running() as started:
        yield started


@pytest.fixture(autouse=True)
def first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of a test is one process's."""
    monkeypatch.setattr(arrivals, "_starts", itertools.repeat(1))


def elsewhere(environment: dict[str, str], host: str = "a", pid: int = 1) -> Arrivals:
    """A rank that comes to its start on a host that is another one than this."""
    return arrive(environment, host=host, machine=f"machine {host}", pid=pid)


def test_the_launcher_knows_who_has_not_come(launcher: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 run on host a, 2 and 3 on host b, 4 on a third."""
    monkeypatch.setattr(arrivals, "this_host", lambda: "a")
    first = elsewhere(launcher.environment(0, 5, 0, 2))
    assert first.missing() == [1, 2, 3, 4]
    elsewhere(launcher.environment(3, 5, 1, 2), "b", 7)
    assert first.missing() == [1, 2, 4]
    assert first.missing_in_words() == "rank 1 (host a), rank 2 (host b), rank 4, which have not come to it"
    elsewhere(launcher.environment(4, 5, 0, 1), "c", 8)
    elsewhere(launcher.environment(1, 5, 1, 2), "a", 9)
    assert first.missing_in_words() == "rank 2 (host b), which has not come to it"
    assert [first.in_words(rank) for rank in (1, 4)] == ["rank 1 (host a, pid 9)", "rank 4 (host c, pid 8)"]
    elsewhere(launcher.environment(2, 5, 0, 2), "b", 10)
    assert first.missing() == []
    assert first.missing_in_words() == ""


def test_of_many_that_are_missing_some_are_named(launcher: Rendezvous) -> None:
    first = elsewhere(launcher.environment(0, 100, 0, 1))
    assert first.missing_in_words() == "rank 1, rank 2, rank 3, rank 4 and others, which have not come to it"


def test_a_later_start_is_one_of_its_own(launcher: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left in an earlier one is none of its arrivals."""
    monkeypatch.setattr(arrivals, "_starts", itertools.chain([1, 1], itertools.repeat(2)))
    for rank in range(2):
        elsewhere(launcher.environment(rank, 2, rank, 2))
    second = elsewhere(launcher.environment(0, 2, 0, 2))
    assert second.missing() == [1]


def test_without_a_launcher_to_ask_nobody_is_known_to_be_missing(launcher: Rendezvous) -> None:
    for environment in ({"OMPI_COMM_WORLD_SIZE": "4"}, {}):
        alone = elsewhere(environment)
        assert (alone.are_known, alone.missing(), alone.missing_in_words(), alone.lost()) == (False, None, "", [])
    first = elsewhere(launcher.environment(0, 2, 0, 2))
    launcher.close()
    assert (first.are_known, first.missing(), first.missing_in_words(), first.lost()) == (True, None, "", [])


@pytest.mark.parametrize("port", ["", "many"])
def test_variables_that_are_no_numbers_are_no_launcher(launcher: Rendezvous, port: str) -> None:
    environment = {**launcher.environment(0, 2, 0, 2), "HOROVOD_GLOO_RENDEZVOUS_PORT": port, "HOROVOD_LOCAL_RANK": port}
    assert not Arrivals(environment).are_known


def test_who_could_not_say_that_it_came_says_it_later(launcher: Rendezvous) -> None:
    """One answer that came too late made a rank missing to all others for good."""
    late = Arrivals(launcher.environment(1, 2, 1, 2))
    other = elsewhere(launcher.environment(0, 2, 0, 2))
    assert other.missing() == [1]
    assert late.missing() == []
    assert other.missing() == []


def test_a_process_that_has_ended_is_lost(launcher: Rendezvous) -> None:
    """Of those on this machine; that one of another machine has its number says nothing."""
    here, pid = arrivals.this_process(), ended_process()
    first = arrive(launcher.environment(0, 3, 0, 3))
    elsewhere(launcher.environment(1, 3, 1, 3), "elsewhere", pid)
    assert first.lost() == []
    arrive(launcher.environment(2, 3, 2, 3), pid=pid)
    assert first.lost() == [f"rank 2 (host {here['host']}, pid {pid})"]


def test_a_process_that_ends_for_another_is_not_lost(launcher: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    here, pid = arrivals.this_process(), ended_process()
    first = arrive(launcher.environment(0, 3, 0, 3))
    for rank in (1, 2):
        arrive(launcher.environment(rank, 3, rank, 3), pid=pid)
    with monkeypatch.context() as patched:
        patched.setattr(arrivals, "this_process", lambda: {**here, "pid": pid})
        Arrivals(launcher.environment(1, 3, 1, 3)).lost()
    assert first.lost() == [f"rank 2 (host {here['host']}, pid {pid})"]
    assert first.whose_end() == f": rank 2 (host {here['host']}, pid {pid}) had ended"


def test_a_process_that_is_about_to_end_is_lost(launcher: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes its time for a SystemExit, and Horovod has ended for the others before it."""
    first = Arrivals(launcher.environment(0, 2, 0, 2))
    first.enter()
    second = Arrivals(launcher.environment(1, 2, 1, 2))
    second.enter()
    monkeypatch.setattr(arrivals, "_LOST_TIME", 0.0)
    assert first.lost() == []
    second.fail()
    assert first.lost() == [first.in_words(1)]
    assert first.whose_end() == f": {first.in_words(1)} had ended"


def test_of_other_machines_those_are_named_that_do_not_say_that_they_end(
    launcher: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only rank of a host was killed: nobody there could say it."""
    first = arrive(launcher.environment(0, 3, 0, 1))
    others = [elsewhere(launcher.environment(rank, 3, 0, 1), f"host-{rank}", 7) for rank in (1, 2)]
    with monkeypatch.context() as patched:
        patched.setattr(arrivals, "this_process", lambda: {"host": "host-1", "machine": "machine host-1", "pid": 7})
        patched.setattr(arrivals.hosts, "machine", lambda: "machine host-1")
        patched.setattr(arrivals, "_has_ended", lambda pid: False)
        others[0].lost()
    assert first.whose_end() == ": rank 2 (host host-2, pid 7) had ended, or did not know yet of the end"


def test_a_process_that_nobody_has_waited_for_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended, and is there until its parent has asked how; one that is about to end has a moment."""
    monkeypatch.setattr(arrivals, "_LOST_TIME", 30.0)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    here = arrivals.this_process()
    met = Arrivals({"OMPI_COMM_WORLD_SIZE": "2"})
    met.met([here, {**here, "pid": ended.pid}])
    assert met.lost() == [f"rank 1 (host {here['host']}, pid {ended.pid})"]
    ended.wait()


def test_those_who_have_met_are_known_without_a_launcher() -> None:
    here = arrivals.this_process()
    met = Arrivals({"OMPI_COMM_WORLD_SIZE": "2"})
    met.met([here, {**here, "host": "b", "pid": 12}])
    assert met.in_words(1) == "rank 1 (host b, pid 12)"


WHOLE = {"host": "b", "machine": "b", "pid": 7, "ranks of its host": [1, 2]}


@pytest.mark.parametrize(
    "said",
    [
        *({**WHOLE, name: value} for name, value in [("ranks of its host", 5), ("ranks of its host", ["1", 2])]),
        *({**WHOLE, name: value} for name, value in [("host", 3), ("host", "b\x1b[2J"), ("pid", "7"), ("pid", True)]),
        ["host", "machine", "pid", "ranks of its host"],
        {"host": "b"},
    ],
)
def test_what_no_rank_has_left_is_no_answer(launcher: Rendezvous, said: object) -> None:
    """Its ranks were unpacked in the thread that ends a start which takes too long."""
    first = elsewhere(launcher.environment(0, 3, 0, 1))
    launcher.kept["/smp_tf.1/1"] = json.dumps(said).encode()
    assert (first.missing(), first.missing_in_words(), first.in_words(1)) == (None, "", "rank 1")
    launcher.kept["/smp_tf.1/1"] = json.dumps(WHOLE).encode()
    assert (first.missing(), first.in_words(1)) == ([2], "rank 1 (host b, pid 7)")

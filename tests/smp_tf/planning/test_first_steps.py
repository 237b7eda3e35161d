"""What a training says of its first steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from smp_tf.errors import PeerError
from smp_tf.job import at_shutdown, runtime
from smp_tf.job.topology import Topology
from smp_tf.job_state import JobState
from smp_tf.partition.mesh import Mesh
from smp_tf.partition.plan.stage_forecast import Use
from smp_tf.planning import first_steps
from smp_tf.planning.first_steps import Expected, RankMemory, render
from tests.partition.plan.test_plan import small_plan
from tests.partition.uses_on_host import with_on_host

MIB = 2**20


def test_the_forecast_stands_beside_what_was_measured_with_the_slots_that_there_are() -> None:
    first, last = small_plan().forecast
    rows = first.with_memory({Use.WEIGHTS: 3 * MIB}), last.with_memory({Use.WEIGHTS: 5 * MIB})
    found = {0: RankMemory(4 * MIB, MIB), 1: RankMemory(None, 0)}
    assert render(small_plan(forecast=rows), found, 0.5, Expected(0.45, True)).splitlines() == [
        "memory after the first steps",
        "┏━━━━━━┳━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━┓",
        "┃ rank ┃ stage ┃ forecast ┃ measured at most ┃",
        "┡━━━━━━╇━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━┩",
        "│    0 │     0 │  4.0 MiB │          4.0 MiB │",
        "│    1 │     1 │  5.0 MiB │      not counted │",
        "└──────┴───────┴──────────┴──────────────────┘",
        "a step takes 0.5 s; forecast: 0.45 s, by the times of its layers",
    ]


def test_of_the_forecast_of_a_processor_what_the_allocator_counts_is_told() -> None:
    first, last = small_plan().forecast
    rows = first.with_memory({Use.WEIGHTS: 3 * MIB}), last.with_memory({Use.WEIGHTS: 5 * MIB})
    # Slots of 1 MiB, where the plan had assumed 2 MiB.
    rows = tuple(row.with_memory({Use.SLOTS: 2 * MIB}) for row in rows)
    found = {0: RankMemory(4 * MIB, MIB), 1: RankMemory(4 * MIB, MIB)}
    expected = Expected(0.45, True, (4 * MIB, 6 * MIB))
    lines = render(small_plan(forecast=rows), found, 0.5, expected).splitlines()
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[4:6]] == [
        ["0", "0", "4.0 MiB", "3.0 MiB", "4.0 MiB"],
        ["1", "1", "6.0 MiB", "5.0 MiB", "4.0 MiB"],
    ]
    assert "of it counted" in lines[2]


def test_what_was_there_before_the_first_step_is_told_beside_what_was_measured() -> None:
    found = {0: RankMemory(4 * MIB, MIB, 2 * MIB), 1: RankMemory(4 * MIB, MIB)}
    lines = render(small_plan(), found, 0.5).splitlines()
    assert [[cell.strip() for cell in line.split("│")[4:-1]] for line in lines[4:6]] == [
        ["2.0 MiB", "4.0 MiB"],
        ["0 B", "4.0 MiB"],
    ]
    assert "there before" in lines[2]


def test_what_is_there_before_is_what_was_in_use_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "_in_use_before", JobState(lambda: None))
    for used in (3 * MIB, 5 * MIB):
        monkeypatch.setattr(first_steps.tf_internals, "memory_in_use", lambda used=used: used)
        first_steps.note_memory_before(MIB)
    assert RankMemory.here().before == 2 * MIB


def test_what_is_on_the_host_is_not_in_the_forecast_of_a_device() -> None:
    rows = tuple(with_on_host(row, Use.SLOTS) for row in small_plan().forecast)
    found = {0: RankMemory(4 * MIB, MIB), 1: RankMemory(4 * MIB, MIB)}
    lines = render(small_plan(forecast=rows), found, 0.5).splitlines()
    assert [line.split("│")[3].strip() for line in lines[4:6]] == ["1.6 KiB"] * 2


def test_where_memory_is_not_counted_the_time_is_told_alone() -> None:
    found = {0: RankMemory(None, MIB), 1: RankMemory(None, 0)}
    assert render(small_plan(), found, 0.0123) == "a step takes 0.0123 s"
    assert render(small_plan(), found, 0.0123, Expected(0.01, False)) == (
        "a step takes 0.0123 s; forecast: 0.01 s, estimated; model.profile measures its layers"
    )


class Rank:
    """What a report needs of a transport: steps that end when a test says so, and messages."""

    def __init__(self, rank: int, message: bytes | Exception = b"") -> None:
        self.rank = rank
        self.cause: dict[str, str] | None = None
        self.message = message
        self.sent: list[bytes] = []
        self.waits: list[tuple[int, bool]] = []
        self.begun = threading.Event()
        self.stopped = False

    def await_step(self, program: int, step: int, *, ended: bool) -> bool:
        assert program == 5
        self.waits.append((step, ended))
        assert self.begun.wait(10)
        return not self.stopped

    def stop_awaiting(self) -> None:
        self.stopped = not self.begun.is_set()
        self.begun.set()

    def send_bytes(self, rank: int, tag: int, data: bytes) -> None:
        self.sent.append(data)

    def recv_bytes(self, rank: int, tag: int, timeout: float) -> bytes:
        if isinstance(self.message, Exception):
            raise self.message
        return self.message


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Watches program 5 on one rank of two; the rank leaves at the end."""
    monkeypatch.setattr(first_steps.tf_internals, "peak_memory", lambda: 7 * MIB)
    monkeypatch.setattr(first_steps, "slot_bytes_here", lambda: 2 * MIB)

    def begin(rank: Rank, replicas: int = 1) -> None:
        topology = Topology(
            Mesh(2 * replicas, 2, "cluster"), rank.rank, 0, 2 * replicas, ("host",) * 2 * replicas, (1,) * 2 * replicas
        )
        running = SimpleNamespace(topology=topology, transport=rank)
        monkeypatch.setattr(runtime, "current", lambda: running)
        first_steps.watch(5, small_plan())

    yield begin
    leave()


def leave() -> None:
    at_shutdown.run_before_leaving()


def test_rank_0_prints_what_all_sent_after_the_fourth_step(
    watch: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    other = Rank(1)
    watch(other)
    other.begun.set()
    leave()
    assert other.waits == [(3, False)]

    first = Rank(0, *other.sent)
    watch(first)
    first.begun.set()
    leave()
    assert first.waits == [(1, True), (3, True)]
    printed = capsys.readouterr().err
    assert printed.count("memory after the first steps") == 1
    assert [line.split("│")[4].strip() for line in printed.splitlines() if "│" in line] == ["7.0 MiB", "7.0 MiB"]
    assert "a step takes" in printed


def test_a_training_goes_on_where_its_first_steps_cannot_be_told(
    watch: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(0, PeerError("nothing came"))
    watch(rank)
    rank.begun.set()
    leave()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("smp_tf: the memory of the first steps is not told: PeerError('nothing came'")


def test_a_training_that_failed_tells_why_and_no_more(
    watch: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(0, PeerError("rank 1 is gone"))
    rank.cause = {"kind": "lost"}
    watch(rank)
    rank.begun.set()
    leave()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_fewer_steps_are_not_told(rank: int, watch: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    found = Rank(rank)
    watch(found)
    leave()
    assert found.sent == []
    assert capsys.readouterr().err == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "smp_tf first steps"]


def test_one_program_of_a_job_and_one_replica_is_told(watch: Callable[..., None]) -> None:
    rank = Rank(3)
    watch(rank, 2)
    assert at_shutdown._before_leaving == []
    rank = Rank(1)
    watch(rank, 2)
    watch(rank, 2)
    assert len(at_shutdown._before_leaving) == 1

"""What a training says of its first steps."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from smp_tf.errors import PeerError, TransportError
from smp_tf.job import at_shutdown, runtime
from smp_tf.job.topology import Topology
from smp_tf.job_state import JobState
from smp_tf.keras.optimizer_reports import slot_bytes_here
from smp_tf.partition.mesh import Mesh
from smp_tf.partition.plan.held_memory import HeldMemory
from smp_tf.partition.plan.stage_forecast import Use
from smp_tf.planning import first_steps
from smp_tf.planning.earlier_trainings import EarlierTrainings
from smp_tf.planning.first_steps import Expected, RankMemory, held_by, render
from tests.partition.plan.test_plan import small_plan
from tests.partition.uses_on_host import with_on_host
from tests.smp_tf.planning.test_earlier_trainings import RECORD, SETTING

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
    monkeypatch.setattr(first_steps, "_before", JobState(lambda: None))
    monkeypatch.setattr(first_steps._State, "peak", 7 * MIB)
    for used in (3 * MIB, 5 * MIB):
        monkeypatch.setattr(first_steps.tf_internals, "memory_in_use", lambda used=used: used)
        monkeypatch.setattr(first_steps.tf_internals, "peak_memory", lambda used=used: 2 * used)
        monkeypatch.setattr(first_steps, "resident_bytes", lambda used=used: 10 * used)
        first_steps.note_memory_before(MIB)
    assert RankMemory.here() == RankMemory(10 * MIB, slot_bytes_here(), 2 * MIB, 20 * MIB, True)
    # What was held before the program ran says nothing of it.
    monkeypatch.setattr(first_steps.tf_internals, "peak_memory", lambda: 6 * MIB)
    assert not RankMemory.here().is_own


def test_resident_memory_grows_with_what_is_made() -> None:
    before = first_steps.resident_bytes()
    held = np.ones(8 * MIB)
    assert first_steps.resident_bytes() - before > 0.9 * held.nbytes


def test_what_is_on_the_host_is_not_in_the_forecast_of_a_device() -> None:
    rows = tuple(with_on_host(row, Use.SLOTS) for row in small_plan().forecast)
    found = {0: RankMemory(4 * MIB, MIB), 1: RankMemory(4 * MIB, MIB)}
    lines = render(small_plan(forecast=rows), found, 0.5).splitlines()
    assert [line.split("│")[3].strip() for line in lines[4:6]] == ["1.6 KiB"] * 2


def test_what_ranks_held_beyond_what_was_there_is_kept_with_what_was_forecast() -> None:
    first, last = small_plan().forecast
    rows = tuple(row.with_memory({Use.SLOTS: 2 * MIB, Use.WEIGHTS: 3 * MIB}) for row in (first, last))
    plan = small_plan(forecast=rows)
    whole = rows[0].device_bytes
    found = {0: RankMemory(9 * MIB, MIB, 2 * MIB), 1: RankMemory(8 * MIB, MIB)}
    assert held_by(plan, found, (4 * MIB, 3 * MIB)) == (
        HeldMemory(7 * MIB, MIB, whole - 4 * MIB, 3 * MIB),
        HeldMemory(8 * MIB, MIB, whole - 3 * MIB, 2 * MIB),
    )
    # The batch was there before, and is in the forecast.
    assert [held.bytes for held in held_by(plan, found, (), MIB)] == [8 * MIB, 8 * MIB]
    assert [held.bytes for held in held_by(plan, found, (), 3 * MIB)] == [9 * MIB, 8 * MIB]
    # On a GPU all is counted. Where nothing is, the memory of the process is told.
    found[1] = RankMemory(None, MIB, 0, 50 * MIB)
    assert held_by(plan, found, ()) == (
        HeldMemory(7 * MIB, MIB, 0, whole - MIB),
        HeldMemory(50 * MIB, MIB, 0, whole - MIB, is_resident=True),
    )
    # What was forecast before any training stays known.
    earlier = HeldMemory(6 * MIB, MIB, 100, 5 * MIB)
    again = held_by(dataclasses.replace(plan, earlier=(earlier, earlier)), found, ())
    assert again[0] == HeldMemory(7 * MIB, MIB, 100, 5 * MIB)
    assert again[1] == HeldMemory(50 * MIB, MIB, 0, whole - MIB, is_resident=True)
    assert held_by(plan, {0: found[0], 1: RankMemory(9 * MIB, 0, is_own=False)}, ()) == ()


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
    monkeypatch.setattr(first_steps, "slot_bytes_here", lambda: 2 * MIB)

    def begin(rank: Rank, replicas: int = 1, expected: Expected | None = None) -> None:
        topology = Topology(
            Mesh(2 * replicas, 2, "cluster"), rank.rank, 0, 2 * replicas, ("host",) * 2 * replicas, (1,) * 2 * replicas
        )
        running = SimpleNamespace(topology=topology, transport=rank)
        monkeypatch.setattr(runtime, "current", lambda: running)
        peaks = iter([3 * MIB])
        monkeypatch.setattr(first_steps.tf_internals, "peak_memory", lambda: next(peaks, 7 * MIB))
        first_steps.watch(5, small_plan(), expected)

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
    assert other.waits == [(3, False), (9, False)]
    assert len(other.sent) == 2

    first = Rank(0, other.sent[0])
    watch(first)
    first.begun.set()
    leave()
    assert first.waits == [(1, True), (3, True), (9, True)]
    printed = capsys.readouterr().err
    assert printed.count("memory after the first steps") == 1
    assert [line.split("│")[4].strip() for line in printed.splitlines() if "│" in line] == ["7.0 MiB", "7.0 MiB"]
    assert "a step takes" in printed


def test_rank_0_keeps_what_all_held_once(
    watch: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SMP_TF_PROFILES", str(tmp_path))
    message = json.dumps(dataclasses.asdict(RankMemory(5 * MIB, MIB))).encode()
    first = Rank(0, message)
    watch(first, expected=Expected(0.1, False, (), RECORD))
    first.begun.set()
    leave()
    forecast = small_plan().forecast[0].device_bytes
    stages = (
        HeldMemory(7 * MIB, 2 * MIB, 0, forecast - 1024 + 2 * MIB),
        HeldMemory(5 * MIB, MIB, 0, forecast - 1024 + MIB),
    )
    assert EarlierTrainings(tmp_path).find(SETTING) == {RECORD.placement: stages}
    assert len(list(tmp_path.iterdir())) == 1
    # A training goes on where that cannot be written.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SMP_TF_PROFILES", str(tmp_path / "file"))
    first = Rank(0, message)
    watch(first, expected=Expected(0.1, False, (), RECORD))
    first.begun.set()
    leave()
    assert "smp_tf: The memory of this training cannot be kept in" in capsys.readouterr().err


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


@pytest.mark.parametrize("number", [0, 1])
def test_a_training_that_failed_and_closed_its_transport_tells_no_more(
    number: int, watch: Callable[..., None], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ended in a traceback: it asked the closed transport for the cause."""

    class Closed(Rank):
        @property
        def cause(self) -> dict[str, str]:
            raise TransportError("the transport of rank 1 is closed")

        @cause.setter
        def cause(self, value: object) -> None:
            pass

        def await_step(self, program: int, step: int, *, ended: bool) -> bool:
            raise TransportError("the transport of rank 1 is closed")

    raised: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: raised.append(told.exc_value))
    watch(Closed(number))
    leave()
    assert (raised, capfd.readouterr().err) == ([], "")


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

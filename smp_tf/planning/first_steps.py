"""Compares the memory and time of a training's first steps with the plan's forecast.

    step      0          1          2          3          4 ...      9
    others    ┆          ┆          ┆   numbers ─┐             numbers ─┐   (as the step begins: nobody waits for these)
    rank 0    ┆        clock        ┆        clock, table              a file for the next training

A separate thread waits for these steps. The program that runs them does not know about it. So a step runs no Python,
and the graphs of all replicas are alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from smp_tf import tf_internals
from smp_tf.announce import columns, tell_in_time
from smp_tf.job import runtime
from smp_tf.job.channel import tag_of
from smp_tf.job.step_waits import wait_beside_steps
from smp_tf.job.topology import Topology
from smp_tf.job_state import JobState
from smp_tf.keras.optimizer_reports import slot_bytes_here
from smp_tf.ops.errors import TransportError
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.plan.held_memory import HeldMemory
from smp_tf.partition.plan.plan import Plan, as_bytes
from smp_tf.partition.plan.stage_forecast import StageForecast, Use
from smp_tf.planning.earlier_trainings import EarlierTrainings, TrainingRecord
from smp_tf.variables.fetch import WRITER

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

#: The steps between whose ends the time is measured. The first step also prepares, and makes the optimizer's slots.
_CLOCK, _TOLD = 1, 3
#: The step after which is kept what ranks have held. In the first steps fewer ops may have run at once.
_KEPT = 9
#: Seconds that rank 0 waits for a message that was sent.
_ON_ITS_WAY = 10.0
_TAG = tag_of("first steps")


@dataclass(frozen=True)
class _Before:
    """What was there when the job's first step was planned.

    Args:
        in_use: bytes that the allocator had given out, without those that the forecast has.
        resident: bytes of the process's memory.
    """

    in_use: int
    resident: int


#: What was there when the job's first step was planned; None before.
_before: JobState[_Before | None] = JobState(lambda: None)


def note_memory_before(forecast: int) -> None:
    """Notes what is in memory before the first step of the job has made anything, such as the arrays given to `fit`.

    Args:
        forecast: bytes of these that the forecast has, as those of weights with which a model was built.
    """
    if _before() is None:
        in_use = max(0, tf_internals.memory_in_use() - forecast)
        _before.put(_Before(in_use, resident_bytes()))


def resident_bytes() -> int:
    """Returns the bytes of this process's memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class _State:
    #: The program that is reported. TensorFlow may trace the function that it is written into more than once.
    program: int | None = None
    #: The most bytes that the allocator had given out before that program ran.
    peak: int = 0


def watch(program: int, plan: Plan, expected: Expected | None = None) -> None:
    """Reports the first steps of a program, unless another one of this job is reported.

    Only trainings over several partitions are reported, and only their first replica.

    Args:
        program: number of the program.
        plan: the plan that it was cut by.
        expected: how long a step should take, where this rank knows it.
    """
    running = runtime.current()
    if _State.program is not None or running.transport is None:
        return
    if running.topology.stages == 1 or running.topology.replica:
        return
    _State.program, _State.peak = program, tf_internals.peak_memory() or 0
    report = _Report(program, plan, expected, running.topology, running.transport)
    # A report that has begun by then is finished; no other begins.
    wait_beside_steps("first steps", running.transport, report.tell, then=_forget_program)


def _forget_program() -> None:
    _State.program = None


@dataclass(frozen=True)
class Expected:
    """How long a step should take by its plan.

    Args:
        seconds: of a step.
        is_measured: whether they come from measured times of layers, at least in part.
        counted: the bytes of each stage's forecast that the allocator of a processor counts, which are those of large
            tensors; () where it counts all, as on a GPU.
        record: what to keep for the next training, without what ranks held; None to keep nothing.
        batch: bytes of the batch that the allocator counts.
    """

    seconds: float
    is_measured: bool
    counted: tuple[int, ...] = ()
    record: TrainingRecord | None = None
    batch: int = 0


@dataclass(frozen=True)
class RankMemory:
    """What a rank says about its first steps.

    Args:
        peak: the most bytes that TensorFlow's allocator has given out; None where it does not count.
        slots: bytes of the optimizer's slots.
        before: bytes that were given out before the first step was planned.
        resident: bytes of the process's memory beyond those that it had then.
        is_own: whether the most bytes were given out while the program ran, so that they say something of it.
    """

    peak: int | None
    slots: int
    before: int = 0
    resident: int = 0
    is_own: bool = True

    @classmethod
    def here(cls) -> RankMemory:
        """Returns what this rank has measured so far."""
        before, peak = _before() or _Before(0, 0), tf_internals.peak_memory()
        grown = max(0, resident_bytes() - before.resident)
        return cls(peak, slot_bytes_here(), before.in_use, grown, peak is None or peak > _State.peak)


class _Report:
    def __init__(
        self, program: int, plan: Plan, expected: Expected | None, topology: Topology, transport: Transport
    ) -> None:
        self._program = program
        self._plan = plan
        self._expected = expected
        self._topology = topology
        self._transport = transport

    def tell(self) -> None:
        """Waits for the first steps. Then rank 0 tells, and others send it what they have measured."""
        try:
            if self._topology.rank == WRITER:
                self._gather()
                return
            for step in (_TOLD, _KEPT):
                if self._transport.await_step(self._program, step, ended=False):
                    # Where rank 0 ends this step, this rank has begun it. So it never waits long.
                    mine = json.dumps(dataclasses.asdict(RankMemory.here()))
                    self._transport.send_bytes(WRITER, _TAG, mine.encode())
        except Exception as error:
            # A training does not end because a report fails, and a training that fails says why itself. It has closed
            # its transport, perhaps, which then knows no cause.
            with contextlib.suppress(TransportError):
                if self._transport.cause is None:
                    tell_in_time(f"smp_tf: the memory of the first steps is not told: {error!r}")

    def _gather(self) -> None:
        if not self._transport.await_step(self._program, _CLOCK, ended=True):
            return
        began = time.monotonic()
        if not self._transport.await_step(self._program, _TOLD, ended=True):
            return
        seconds = (time.monotonic() - began) / (_TOLD - _CLOCK)
        tell_in_time(render(self._plan, self._all_of_them(), seconds, self._expected, columns()))
        if self._transport.await_step(self._program, _KEPT, ended=True):
            self._keep(self._all_of_them())

    def _all_of_them(self) -> dict[int, RankMemory]:
        """Returns what all ranks of the replica have measured so far, by world rank."""
        found = {WRITER: RankMemory.here()}
        for rank in self._topology.members(CommGroup.MP_GROUP):
            if rank != WRITER:
                text = self._transport.recv_bytes(rank, _TAG, _ON_ITS_WAY)
                found[rank] = RankMemory(**json.loads(bytes(text)))
        return found

    def _keep(self, found: Mapping[int, RankMemory]) -> None:
        """Keeps what ranks held, for the next plan."""
        expected = self._expected
        if expected is None or expected.record is None:
            return
        held = held_by(self._plan, found, expected.counted, expected.batch)
        if held:
            kept = EarlierTrainings()
            kept.keep(dataclasses.replace(expected.record, stages=held))
            if kept.trouble:
                tell_in_time(f"smp_tf: {kept.trouble}")


def held_by(
    plan: Plan, found: Mapping[int, RankMemory], counted: Sequence[int], batch: int = 0
) -> tuple[HeldMemory, ...]:
    """Returns what the ranks of all stages held; () where more was held before the first step by another job.

    Args:
        plan: with the forecast of every stage.
        found: what ranks said, by world rank: those of one replica, in the order of their stages.
        counted: the bytes of each stage's forecast that the allocator counts; () where it counts all.
        batch: bytes of the batch that the allocator counts.
    """
    if not all(measured.is_own for measured in found.values()):
        return ()
    held = []
    for stage, measured in enumerate(found.values()):
        forecast = with_slots(plan.forecast[stage], measured.slots).device_bytes
        large = counted_of(plan, counted, stage, measured.slots) if counted else forecast
        if measured.peak is None:
            now = HeldMemory(measured.resident, measured.slots, 0, forecast, is_resident=True)
        else:
            # The batch, which is in the forecast, may have been among what was there before.
            other = max(0, measured.before - batch)
            now = HeldMemory(max(0, measured.peak - other), measured.slots, forecast - large, large)
        if plan.earlier and plan.earlier[stage].is_resident == now.is_resident:
            # The forecast is what was held before. What was forecast without that says more.
            before = plan.earlier[stage]
            now = dataclasses.replace(now, uncounted=before.uncounted, forecast=before.forecast)
        held.append(now)
    return tuple(held)


def render(
    plan: Plan, found: Mapping[int, RankMemory], seconds: float, expected: Expected | None = None, width: int = 100
) -> str:
    """Returns the forecast of every rank next to its measurements.

    Args:
        plan: with the forecast of every stage.
        found: what ranks said, by world rank: those of one replica, in the order of their stages.
        seconds: of a step.
        expected: how long it should take.
        width: columns of the terminal.

    Returns:
        Lines, each at most `width` wide. Memory is among them where at least one rank has counted it.
    """
    if all(measured.peak is None for measured in found.values()):
        return _step_in_words(seconds, expected)
    table = Table(title="memory after the first steps", title_justify="left", expand=False)
    counted = expected.counted if expected is not None else ()
    is_told = any(measured.before for measured in found.values())
    besides = [*["of it counted"] * bool(counted), *["there before"] * is_told]
    for column in ("rank", "stage", "forecast", *besides, "measured at most"):
        table.add_column(column, justify="right")
    for stage, (rank, measured) in enumerate(found.items()):
        row = with_slots(plan.forecast[stage], measured.slots)
        peak = "not counted" if measured.peak is None else as_bytes(measured.peak)
        large = [as_bytes(counted_of(plan, counted, stage, measured.slots))] if counted else []
        before = [as_bytes(measured.before)] * is_told
        table.add_row(str(rank), str(stage), as_bytes(row.device_bytes), *large, *before, peak)
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join([*lines, _step_in_words(seconds, expected)])


def _step_in_words(seconds: float, expected: Expected | None) -> str:
    words = f"a step takes {seconds:.3g} s"
    if expected is None:
        return words
    source = "by the times of its layers" if expected.is_measured else "estimated; model.profile measures its layers"
    return f"{words}; forecast: {expected.seconds:.3g} s, {source}"


def counted_of(plan: Plan, counted: Sequence[int], stage: int, slots: int) -> int:
    """Returns the bytes of a stage's forecast that the allocator counts, with the optimizer's real slots.

    Args:
        plan: with the forecast of every stage.
        counted: the bytes of each stage that are counted, with the slots of the plan.
        stage: which stage.
        slots: bytes of the real slots.
    """
    row = plan.forecast[stage]
    changed = with_slots(row, slots)
    return min(changed.device_bytes, counted[stage] + changed.device_bytes - row.device_bytes)


def with_slots(row: StageForecast, slots: int) -> StageForecast:
    """Returns the forecast with the optimizer's real slots, where the plan could only assume some."""
    return row.with_memory({Use.SLOTS: slots})

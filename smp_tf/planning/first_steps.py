"""Compares the memory and time of a training's first steps with the plan's forecast.

    step      0          1          2          3          4 ...
    others    ┆          ┆          ┆   numbers ─┐         (as the fourth begins: nobody waits for this message)
    rank 0    ┆        clock        ┆        clock, table

A separate thread waits for these steps. The program that runs them does not know about it. So a step runs no Python,
and the graphs of all replicas are alike.
"""

from __future__ import annotations

import dataclasses
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.plan.plan import Plan, as_bytes
from smp_tf.partition.plan.stage_forecast import StageForecast, Use
from smp_tf.variables.fetch import WRITER

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

#: The steps between whose ends the time is measured. The first step also prepares, and makes the optimizer's slots.
_CLOCK, _TOLD = 1, 3
#: Seconds that rank 0 waits for a message that was sent.
_ON_ITS_WAY = 10.0
_TAG = tag_of("first steps")


#: Bytes in use when the job's first step was planned; None before.
_in_use_before: JobState[int | None] = JobState(lambda: None)


def note_memory_before(forecast: int) -> None:
    """Notes what is in memory before the first step of the job has made anything, such as the arrays given to `fit`.

    Args:
        forecast: bytes of these that the forecast has, as those of weights with which a model was built.
    """
    if _in_use_before() is None:
        _in_use_before.put(max(0, tf_internals.memory_in_use() - forecast))


class _State:
    #: The program that is reported. TensorFlow may trace the function that it is written into more than once.
    program: int | None = None


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
    _State.program = program
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
            tensors; () on a GPU, where it counts all.
    """

    seconds: float
    is_measured: bool
    counted: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankMemory:
    """What a rank says about its first steps.

    Args:
        peak: the most bytes that TensorFlow's allocator has given out; None where it does not count.
        slots: bytes of the optimizer's slots.
        before: bytes that were given out before the first step was planned.
    """

    peak: int | None
    slots: int
    before: int = 0

    @classmethod
    def here(cls) -> RankMemory:
        """Returns what this rank has measured so far."""
        return cls(tf_internals.peak_memory(), slot_bytes_here(), _in_use_before() or 0)


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
            elif self._transport.await_step(self._program, _TOLD, ended=False):
                # Where rank 0 ends this step, this rank has begun it. So it never waits long.
                mine = json.dumps(dataclasses.asdict(RankMemory.here()))
                self._transport.send_bytes(WRITER, _TAG, mine.encode())
        except Exception as error:
            # A training does not end because a report fails, and a training that fails says why itself.
            if self._transport.cause is None:
                tell_in_time(f"smp_tf: the memory of the first steps is not told: {error!r}")

    def _gather(self) -> None:
        if not self._transport.await_step(self._program, _CLOCK, ended=True):
            return
        began = time.monotonic()
        if not self._transport.await_step(self._program, _TOLD, ended=True):
            return
        seconds = (time.monotonic() - began) / (_TOLD - _CLOCK)
        found = {WRITER: RankMemory.here()}
        for rank in self._topology.members(CommGroup.MP_GROUP):
            if rank != WRITER:
                text = self._transport.recv_bytes(rank, _TAG, _ON_ITS_WAY)
                found[rank] = RankMemory(**json.loads(bytes(text)))
        tell_in_time(render(self._plan, found, seconds, self._expected, columns()))


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

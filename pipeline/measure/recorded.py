"""What one rank did in the steps of a recording: its tasks and messages, with begin and end.

    points  ─ steps_of ─▶  RecordedStep 10: 0F0 [120, 340], 0S0.0 [341, 390], 0R1.0 [341, 980], 0B0 [985, 1400] ...

Times are in nanoseconds. `RankRecord.shifted` puts all ranks on one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from smp_tf.ops.recorder import Event, Point
from smp_tf.pipeline.programs.kinds import SUM
from smp_tf.pipeline.programs.text import parse
from smp_tf.pipeline.task import Edge, Kind, Program, Task


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One task that ran: a compute task, a REDUCE or an APPLY."""

    task: Task
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Message:
    """One send or receive.

    Attributes:
        task: the SEND or RECV.
        peer: world rank at the other end.
        begin: when the send was started, or the receive posted.
        end: when the memory of what was sent was free again, or the message had been received.
        bytes: size of the tensor.
    """

    task: Task
    peer: int
    begin: int
    end: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of one rank.

    Attributes:
        program: number of the step function's program.
        step: number of the step.
        begin: when the rank began it.
        end: when its pipeline was done on this rank.
        until: when the rank began its next step, or was done with what follows the last one.
        tasks: its tasks, in the order in which they began.
        messages: its messages, in the order in which they began.
    """

    program: int
    step: int
    begin: int
    end: int
    until: int
    tasks: tuple[TaskRun, ...]
    messages: tuple[Message, ...]

    @property
    def compute(self) -> tuple[TaskRun, ...]:
        """Returns the compute tasks."""
        return tuple(run for run in self.tasks if run.task.kind.is_compute)

    @property
    def updates(self) -> tuple[TaskRun, ...]:
        """Returns the reductions and updates. They may overlap with each other and with compute tasks."""
        return tuple(run for run in self.tasks if not run.task.kind.is_compute)


def rows_of(runs: Iterable[TaskRun]) -> list[list[TaskRun]]:
    """Puts tasks into as few rows as are needed for nothing to overlap within a row.

    Args:
        runs: tasks of any number of steps.

    Returns:
        The rows, each in the order of time.
    """
    rows: list[list[TaskRun]] = []
    for run in sorted(runs, key=lambda run: (run.begin, run.end)):
        free = next((row for row in rows if row[-1].end <= run.begin), None)
        if free is None:
            rows.append([run])
        else:
            free.append(run)
    return rows


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """A program that was recorded.

    Attributes:
        name: of the step function.
        schedule: by which its tasks are ordered.
        planned: the planned tasks of all stages.
        edges: the edges that its transfers name.
        tensors: the words for what is sent, by edge.
    """

    name: str
    schedule: str
    planned: Program
    edges: tuple[Edge, ...]
    tensors: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which a rank had nothing to compute, until a message came.

    Attributes:
        begin: when the task before had ended, or the step had begun.
        end: when the message had come.
        message: the last one that the next task needs.
    """

    begin: int
    end: int
    message: Message


def waits_of(step: RecordedStep, program: ProgramRecord) -> list[Wait]:
    """Returns when a rank waited for messages in a step.

    Args:
        step: of the rank.
        program: that it ran.

    Returns:
        The waits, in order.
    """
    needed: dict[tuple[int, int | None, int | None], list[Message]] = {}
    edges = {edge.index: edge for edge in program.edges}
    for message in step.messages:
        if message.task.kind is Kind.RECV and message.task.edge is not None:
            edge = edges[message.task.edge]
            needed.setdefault((edge.dst_chunk, edge.dst_sweep, message.task.microbatch), []).append(message)
    found = []
    free = step.begin
    for run in step.compute:
        needs = needed.get((run.task.chunk, run.task.sweep, run.task.microbatch), [])
        last = max(needs, key=lambda message: message.end, default=None)
        if last is not None and free < last.end:
            found.append(Wait(free, min(last.end, run.begin), last))
        free = max(free, run.end)
    return found


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank recorded.

    Attributes:
        rank: its world rank.
        stage: its stage.
        ranks: the world rank of every stage of its replica.
        job: an identifier that all ranks of a run share, and no other run has.
        programs: by number.
        steps: in order.
        dropped: how many points in time could not be kept.
    """

    rank: int
    stage: int
    ranks: tuple[int, ...]
    job: str
    programs: dict[int, ProgramRecord]
    steps: tuple[RecordedStep, ...]
    dropped: int = 0

    def shifted(self, nanoseconds: int) -> RankRecord:
        """Returns the same record on a clock that is ahead by a number of nanoseconds."""
        return replace(self, steps=tuple(_shifted(step, nanoseconds) for step in self.steps))


def _shifted(step: RecordedStep, by: int) -> RecordedStep:
    return replace(
        step,
        begin=step.begin + by,
        end=step.end + by,
        until=step.until + by,
        tasks=tuple(replace(run, begin=run.begin + by, end=run.end + by) for run in step.tasks),
        messages=tuple(replace(message, begin=message.begin + by, end=message.end + by) for message in step.messages),
    )


def steps_of(points: Iterable[Point], programs: Mapping[int, ProgramRecord], stage: int) -> tuple[RecordedStep, ...]:
    """Makes steps from the points of a recording.

    A step of another program, such as a norm over all stages, becomes a SUM of the step before it.

    Args:
        points: as `recorder.stop` gives them.
        programs: the programs whose steps are wanted, by number.
        stage: stage of this rank.

    Returns:
        The steps that began and ended within the recording.
    """
    found: list[_Step] = []
    by_name: dict[tuple[int, int], _Step] = {}
    for point in sorted(points, key=lambda each: each.time_ns):
        if point.event is Event.STEP and point.program in programs and not point.is_end:
            if found:
                found[-1].until = point.time_ns
            found.append(_Step(point, stage, programs[point.program]))
            by_name[point.program, point.step] = found[-1]
        elif point.program in programs and point.step >= 0:
            step = by_name.get((point.program, point.step))
            if step is not None:
                step.take(point)
        elif found and point.event in (Event.TASK, Event.STEP):
            found[-1].take(point)
    return tuple(step.recorded() for step in found if step.end is not None)


class _Step:
    def __init__(self, begin: Point, stage: int, program: ProgramRecord) -> None:
        self.begin = begin
        self.edges = {edge.index: edge for edge in program.edges}
        self.end: int | None = None
        self.until = 0
        self.stage, self.sums = stage, 0
        self.open: dict[object, Point] = {}
        self.tasks: list[TaskRun] = []
        self.messages: list[Message] = []

    def take(self, point: Point) -> None:
        if point.event is Event.STEP and point.program == self.begin.program:
            self.end = point.time_ns
            return
        name = (point.event, point.program, point.task, point.edge, point.microbatch)
        if not point.is_end:
            self.open[name] = point
            return
        begun = self.open.pop(name, None)
        if begun is None:
            return
        if point.event is Event.STEP:
            # The first one goes without a number, as in the list.
            self.tasks.append(TaskRun(Task(SUM, self.stage, bucket=self.sums or None), begun.time_ns, point.time_ns))
            self.sums += 1
        elif point.event is Event.TASK:
            self.tasks.append(TaskRun(parse(point.task), begun.time_ns, point.time_ns))
        elif point.edge in self.edges:
            task = _transfer(self.edges[point.edge], point)
            self.messages.append(Message(task, point.peer, begun.time_ns, point.time_ns, point.bytes))

    def recorded(self) -> RecordedStep:
        assert self.end is not None
        last = max([self.end, *(run.end for run in self.tasks)])
        return RecordedStep(
            self.begin.program,
            self.begin.step,
            self.begin.time_ns,
            self.end,
            self.until or last,
            tuple(sorted(self.tasks, key=lambda run: (run.begin, run.end))),
            tuple(sorted(self.messages, key=lambda message: (message.begin, message.end))),
        )


def _transfer(edge: Edge, point: Point) -> Task:
    """Returns the task that sends or receives a message."""
    microbatch = point.microbatch if edge.per == "microbatch" else None
    if point.event is Event.SEND:
        return Task(Kind.SEND, edge.src_chunk, microbatch, edge=edge.index)
    return Task(Kind.RECV, edge.dst_chunk, microbatch, edge=edge.index)


def one_step(records: Sequence[RankRecord], program: int, step: int) -> list[RecordedStep | None]:
    """Returns a step on each of some ranks; None where it was not recorded."""
    return [
        next((found for found in record.steps if (found.program, found.step) == (program, step)), None)
        for record in records
    ]

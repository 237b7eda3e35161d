"""Replays a program, to find when each task runs, and which ranks get stuck.

Every rank goes through its list. A compute task starts when the rank is free and all that it depends on has ended.
Transfers, and what ranks do with other replicas, are handled by `walk`.

With a limit on send buffers, a rank passes a SEND only when a buffer of that edge is free. A buffer is free again when
its transfer has moved.

The result does not depend on which rank goes on first, so a rank's time may be far ahead of another's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from smp_tf.pipeline.programs.dependencies import Dependencies
from smp_tf.pipeline.programs.walk import Walk
from smp_tf.pipeline.task import Kind, Program, Task


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran, in the unit of the given durations.

    A transfer starts when its end is opened, and ends when the tensor has arrived.
    """

    task: Task
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that waits forever, its position in the list, and the tasks that it waits for."""

    rank: int
    position: int
    needs: tuple[Task, ...]


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        program: the program that was replayed.
        starts: when each task of each rank's list started; None for a task that did not run.
        ends: when these tasks ended.
        stuck: the ranks that did not get through their lists.
    """

    program: Program
    starts: tuple[tuple[float | None, ...], ...]
    ends: tuple[tuple[float | None, ...], ...]
    stuck: tuple[Stuck, ...]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Returns the spans of the tasks that ran, in the order of each rank's list."""
        return tuple(
            tuple(
                Span(task, start, end)
                for task, start, end in zip(*lists, strict=True)
                if start is not None and end is not None
            )
            for lists in zip(self.program.ranks, self.starts, self.ends, strict=True)
        )


def replay(
    program: Program,
    depends: Dependencies,
    duration: Callable[[Task], float],
    latency: Callable[[Task], float],
    send_buffers: Mapping[int, int] | None = None,
) -> Replay:
    """Runs the program on paper.

    Args:
        program: the lists to go through.
        depends: what its tasks depend on, from `dependencies`.
        duration: returns the time that a rank is busy with a task that is no transfer.
        latency: returns the time between a task and a dependent of it on another rank. It is asked about SEND tasks,
            and about compute tasks that another rank's compute task depends on.
        send_buffers: how many tensors of an edge a sender can hold, by edge; None for any number.

    Returns:
        When the tasks ran, and where ranks got stuck.
    """
    replayer = _Replayer(program, depends, duration, latency, send_buffers)
    return replayer.run()


class _Replayer(Walk):
    """Replays a program. Each lane has its own clock."""

    def __init__(
        self,
        program: Program,
        depends: Dependencies,
        duration: Callable[[Task], float],
        latency: Callable[[Task], float],
        send_buffers: Mapping[int, int] | None,
    ) -> None:
        super().__init__(program, depends, latency)
        self.duration = duration
        self.send_buffers = send_buffers
        self.free_at = [0.0] * len(self.lanes)
        self.sent: dict[int | None, list[int]] = {}

    def _advance(self, lane: int, number: int) -> bool:
        task = self.tasks[number]
        if task.kind is Kind.RECV:
            self._open_receive(number, self.free_at[lane])
            return True
        if task.kind is Kind.SEND:
            return self._send(lane, number)
        ready = self._ready(lane, number, self.free_at[lane])
        if ready is None:
            return False
        self.start[number] = ready
        self.free_at[lane] = ready + self.duration(task)
        self._ends(number, self.free_at[lane])
        return True

    def _send(self, lane: int, number: int) -> bool:
        holder = self._holder(number)
        for need in self.needs[number] if holder is None else (holder, *self.needs[number]):
            if self.end[need] is None:
                self._wait(lane, need)
                return False
        if holder is not None:
            free = self.end[holder]
            assert free is not None
            self.free_at[lane] = max(self.free_at[lane], free)
        self.sent.setdefault(self.tasks[number].edge, []).append(number)
        self._open_send(number, self.free_at[lane])
        return True

    def _holder(self, number: int) -> int | None:
        """Returns the earlier SEND whose buffer this one needs."""
        if self.send_buffers is None:
            return None
        edge = self.tasks[number].edge
        assert edge is not None
        earlier, buffers = self.sent.get(edge, ()), self.send_buffers[edge]
        return earlier[-buffers] if len(earlier) >= buffers else None

    def run(self) -> Replay:
        self._go_on()
        bounds = list(zip(self.first, self.first[1:], strict=False))
        return Replay(
            self.program,
            tuple(tuple(self.start[begin:end]) for begin, end in bounds),
            tuple(tuple(self.end[begin:end]) for begin, end in bounds),
            tuple(self._stuck()),
        )

    def _stuck(self) -> list[Stuck]:
        stuck: list[Stuck] = []
        if self.end.count(None) == len(self.tasks) - self.first[-1]:
            return stuck
        receive_of = {needs[0]: at for at, needs in enumerate(self.needs) if self.tasks[at].kind is Kind.RECV}
        for lane, numbers in enumerate(self.lanes):
            rank, at = self.rank_of(lane), self.at[lane]
            first = self.first[rank]
            if at < len(numbers):
                stuck.append(Stuck(rank, numbers[at] - first, self._missing(numbers[at])))
                continue
            # It went through its list, but the other end of a transfer that it opened is missing.
            open_end = next((number for number in numbers if self.end[number] is None), None)
            if open_end is not None:
                is_send = self.tasks[open_end].kind is Kind.SEND
                other = receive_of.get(open_end) if is_send else self.needs[open_end][0]
                stuck.append(Stuck(rank, open_end - first, () if other is None else (self.tasks[other],)))
        return stuck

    def _missing(self, number: int) -> tuple[Task, ...]:
        """Returns what the task that a rank is at waits for."""
        holder = self._holder(number) if self.tasks[number].kind is Kind.SEND else None
        if holder is not None and self.end[holder] is None:
            return (self.tasks[holder],)
        return tuple(self.tasks[need] for need in self.needs[number] if self.end[need] is None)

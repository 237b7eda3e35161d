r"""Replays a program: when does each task run, and which ranks get stuck.

Every rank goes through its list. A compute task starts when the rank is free and all it depends on
is finished. SEND and RECV take the rank no time: they open one end of a transfer, which moves when
both ends are open (a rendezvous) and is finished a latency later:

    rank 0   |--- F0 ---| S0.0 opens
                              \ latency
    rank 1   |-- B --| R0.0 opened earlier, finished here, its reader may start

With a limit on send buffers, a rank does not pass a SEND before one of the buffers of that edge is
free again, and a buffer is free when its transfer has moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smp_tf.pipeline.task import Kind, Program, Task


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran, in the unit of the given durations.

    A transfer starts when its end is opened and ends when the tensor has arrived.
    """

    task: Task
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that waits forever: at which position of its list, and for which tasks."""

    rank: int
    position: int
    needs: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """What came out: the spans of each rank's list, and the ranks that did not get through."""

    spans: tuple[tuple[Span, ...], ...]
    stuck: tuple[Stuck, ...]


def replay(
    program: Program,
    needs: Mapping[Task, tuple[Task, ...]],
    duration: Callable[[Task], float],
    latency: Callable[[Task], float],
    send_buffers: Mapping[int, int] | None = None,
) -> Replay:
    """Runs the program on paper.

    Args:
        program: the lists to go through.
        needs: what each task depends on, as `dependencies` returns it.
        duration: time a rank is busy with a task that is not a transfer.
        latency: time between a task and a dependent of it on another rank; asked about SEND tasks,
            and about compute tasks that another rank's compute task depends on.
        send_buffers: how many tensors of an edge a sender can hold, by edge; None for any number.

    Returns:
        The spans of the tasks that ran, and where ranks got stuck.
    """
    return _Replayer(program, needs, duration, latency, send_buffers).run()


def ready_at(
    rank: int,
    needs: tuple[Task, ...],
    end: Mapping[Task, float],
    rank_of: Mapping[Task, int],
    latency: Callable[[Task], float],
) -> float | None:
    """When all that a task needs is there.

    Args:
        rank: where the task is.
        needs: what it depends on.
        end: of the tasks of which that is known.
        rank_of: the ranks of these that are no transfers.
        latency: time from a task to a dependent of it on another rank.

    Returns:
        The time; None while it is not known of all.
    """
    ready = 0.0
    for need in needs:
        ended = end.get(need)
        if ended is None:
            return None
        elsewhere = not need.kind.is_transfer and rank_of[need] != rank
        ready = max(ready, ended + latency(need) if elsewhere else ended)
    return ready


class _Replayer:
    def __init__(
        self,
        program: Program,
        needs: Mapping[Task, tuple[Task, ...]],
        duration: Callable[[Task], float],
        latency: Callable[[Task], float],
        send_buffers: Mapping[int, int] | None,
    ) -> None:
        self.program = program
        self.needs = needs
        self.duration = duration
        self.latency = latency
        self.send_buffers = send_buffers
        self.position = [0] * program.stages
        self.free_at = [0.0] * program.stages
        self.start: dict[Task, float] = {}
        self.end: dict[Task, float] = {}
        self.rank_of: dict[Task, int] = {}
        self.opened: dict[tuple[int | None, int | None], Task] = {}
        self.sent: dict[int | None, list[Task]] = defaultdict(list)

    def run(self) -> Replay:
        progress = True
        while progress:
            progress = False
            for rank in range(self.program.stages):
                while self._advance(rank):
                    progress = True
        spans = tuple(
            tuple(Span(task, self.start[task], self.end[task]) for task in tasks if task in self.end)
            for tasks in self.program.ranks
        )
        return Replay(spans, tuple(self._stuck()))

    def _advance(self, rank: int) -> bool:
        """Takes the next task of a rank; False when it cannot be taken yet."""
        tasks = self.program.ranks[rank]
        if self.position[rank] == len(tasks):
            return False
        task = tasks[self.position[rank]]
        if task.kind.is_transfer:
            if self._missing(task):
                return False
            self._open(rank, task)
        else:
            ready = ready_at(rank, self.needs[task], self.end, self.rank_of, self.latency)
            if ready is None:
                return False
            self.start[task] = start = max(self.free_at[rank], ready)
            self.free_at[rank] = self.end[task] = start + self.duration(task)
            self.rank_of[task] = rank
        self.position[rank] += 1
        return True

    def _missing(self, task: Task) -> tuple[Task, ...]:
        if task.kind is Kind.RECV:
            return ()
        holder = self._holder(task)
        if holder is not None and holder not in self.end:
            return (holder,)
        return tuple(need for need in self.needs[task] if need not in self.end)

    def _holder(self, task: Task) -> Task | None:
        """The earlier SEND whose buffer this one needs."""
        if task.kind is not Kind.SEND or self.send_buffers is None:
            return None
        assert task.edge is not None
        earlier, buffers = self.sent[task.edge], self.send_buffers[task.edge]
        return earlier[-buffers] if len(earlier) >= buffers else None

    def _open(self, rank: int, task: Task) -> None:
        if task.kind is Kind.SEND:
            holder = self._holder(task)
            if holder is not None:
                self.free_at[rank] = max(self.free_at[rank], self.end[holder])
            self.sent[task.edge].append(task)
        self.start[task] = self.free_at[rank]
        transfer = task.edge, task.microbatch
        other = self.opened.setdefault(transfer, task)
        if other.kind is not task.kind:
            send = task if task.kind is Kind.SEND else other
            arrived = max(self.start[task], self.start[other]) + self.latency(send)
            self.end[task] = self.end[other] = arrived

    def _stuck(self) -> list[Stuck]:
        stuck = []
        for rank, tasks in enumerate(self.program.ranks):
            position = self.position[rank]
            if position < len(tasks):
                stuck.append(Stuck(rank, position, self._missing(tasks[position])))
                continue
            for position, task in enumerate(tasks):
                if task not in self.end:
                    other = next(need for need in self.needs[task])
                    stuck.append(Stuck(rank, position, (other,)))
                    break
        return stuck

r"""Simulates a program whose ranks share the processors of a host: a task is faster while others wait.

    rank 0   |-- F0 --|- F1 -|          |---- B0 ----|--- B1 ---|
    rank 1            |- F0 -|--- B0 ---|-- F1 --|--- B1 ---|
                      both compute       B alone: faster

What a task needs of its host is the larger, the less it slows down when it is alone, and known from two measurements
of it: beside as many as share the host, and alone. While those that run at a moment need no more than there is, each
goes at the pace it has alone; else all slow down in the same measure (processor sharing).

Source: Kleinrock, "Queueing Systems", volume 2 (1976), section 4.4, with several processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from smp_tf.pipeline.collection import collection_put_off
from smp_tf.pipeline.dependencies import dependencies
from smp_tf.pipeline.replay import Span
from smp_tf.pipeline.simulate import Timeline, Times, latency_of, times_per_chunk, waits_forever
from smp_tf.pipeline.task import Edge, Kind, Program, Task


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which ranks of a program share a host, and what their tasks gain where the others of it wait.

    Attributes:
        hosts: a number for the host of each rank.
        forward: what share of its time beside all ranks of its host a forward task takes alone, above 0, at most 1.
        backward: the same of backward tasks.

    Example:
        >>> Sharing(hosts=(0, 0), forward=1.0, backward=0.5)
        Sharing(hosts=(0, 0), forward=1.0, backward=0.5)
    """

    hosts: tuple[int, ...]
    forward: float
    backward: float

    def of(self, task: Task) -> float:
        """What share of its time beside others a task takes alone."""
        match task.kind:
            case Kind.F:
                return self.forward
            case Kind.B | Kind.I | Kind.W:
                return self.backward
            case _:
                return 1.0


@collection_put_off()
def simulate_on_hosts(
    program: Program,
    times: Times,
    edges: Sequence[Edge] | None,
    sharing: Sharing,
    *,
    comm: float | Mapping[int, float] = 0.0,
) -> Timeline:
    """Returns what would run when, where ranks share hosts.

    Args:
        program: a program with or without transfers.
        times: task times of every chunk, or one for all, each beside as many tasks like it as its host has ranks.
        edges: as for `simulate`.
        sharing: which ranks share a host, and what they gain alone.
        comm: as for `simulate`.

    Returns:
        The timeline.

    Raises:
        ProgramError: ranks wait for each other forever.
        ScheduleError: not as many times as chunks, or times per edge that lack an edge.

    Example:
        >>> from smp_tf.pipeline.schedule import build
        >>> from smp_tf.pipeline.simulate import ChunkTimes
        >>> sharing = Sharing(hosts=(0, 0), forward=0.5, backward=0.5)
        >>> simulate_on_hosts(build("simple", stages=2, microbatches=1), ChunkTimes(), None, sharing).step_time
        3.0
    """
    per_chunk = times_per_chunk(times, program.chunks)
    hosts = _Hosts(program, edges, lambda task: per_chunk[task.chunk].of(task), latency_of(comm, edges), sharing)
    hosts.run()
    for rank, tasks in enumerate(program.ranks):
        for position, task in enumerate(tasks):
            if position >= hosts.position[rank] or task not in hosts.end:
                raise waits_forever(program, rank, position)
    return Timeline(program, hosts.spans())


class _Hosts:
    """The state at one moment, and how it goes on to the next at which something ends or arrives."""

    def __init__(
        self,
        program: Program,
        edges: Sequence[Edge] | None,
        duration: Callable[[Task], float],
        latency: Callable[[Task], float],
        sharing: Sharing,
    ) -> None:
        self.program, self.duration, self.latency, self.sharing = program, duration, latency, sharing
        self.needs = dependencies(program, edges).by_task()
        self.now = 0.0
        self.position = [0] * program.stages
        self.start: dict[Task, float] = {}
        #: Of what has ended, or will without more work: a transfer whose ends are open.
        self.end: dict[Task, float] = {}
        self.rank_of: dict[Task, int] = {}
        self.opened: dict[tuple[int | None, int | None], Task] = {}
        #: What runs, by rank, with the seconds that it would still take alone.
        self.left: dict[int, float] = {}
        self.ranks_on = {host: sharing.hosts.count(host) for host in sharing.hosts}

    def run(self) -> None:
        while True:
            # What a rank opens or ends may let another go on.
            while any([self._advance(rank) for rank in range(self.program.stages)]):
                pass
            pace = {host: self._pace(host) for host in self.ranks_on}
            ends = [self.now + left / pace[self.sharing.hosts[rank]] for rank, left in self.left.items()]
            moment = min([*ends, self._next_arrival()])
            if moment == math.inf:
                return
            for rank, left in self.left.items():
                # In whole where it is the one that ends: a rest of rounding would be another moment.
                gone = (moment - self.now) * pace[self.sharing.hosts[rank]]
                at_end = self.now + left / pace[self.sharing.hosts[rank]] <= moment
                self.left[rank] = 0.0 if at_end else left - gone
            self.now = moment

    def _pace(self, host: int) -> float:
        """At which share of the pace they have alone those that run on a host go on."""
        needed = 0.0
        for rank in self.left:
            if self.sharing.hosts[rank] == host:
                task = self.program.ranks[rank][self.position[rank]]
                needed += 1.0 / (self.ranks_on[host] * self.sharing.of(task))
        return 1.0 / max(1.0, needed)

    def _next_arrival(self) -> float:
        """When the next rank that waits may go on, without anything else that ends."""
        found = math.inf
        for rank, tasks in enumerate(self.program.ranks):
            if rank in self.left or self.position[rank] == len(tasks):
                continue
            ready = self._ready(rank, tasks[self.position[rank]])
            if ready is not None and ready > self.now:
                found = min(found, ready)
        return found

    def _ready(self, rank: int, task: Task) -> float | None:
        """When all that a task needs is there; None while that is not known of all."""
        ready = 0.0
        for need in self.needs[task]:
            ended = self.end.get(need)
            if ended is None:
                return None
            elsewhere = not need.kind.is_transfer and self.rank_of[need] != rank
            ready = max(ready, ended + self.latency(need) if elsewhere else ended)
        return ready

    def _advance(self, rank: int) -> bool:
        """Goes on with a rank's list at this moment; False where it cannot."""
        tasks = self.program.ranks[rank]
        if self.left.get(rank) == 0.0:
            task = tasks[self.position[rank]]
            del self.left[rank]
            self.end[task] = self.now
            self.position[rank] += 1
            return True
        if rank in self.left or self.position[rank] == len(tasks):
            return False
        task = tasks[self.position[rank]]
        if task.kind is not Kind.RECV:
            ready = self._ready(rank, task)
            if ready is None or (ready > self.now and not task.kind.is_transfer):
                return False
        self.start[task] = self.now
        if task.kind.is_transfer:
            self._open(task)
            self.position[rank] += 1
        else:
            self.rank_of[task] = rank
            self.left[rank] = self.duration(task) * self.sharing.of(task)
        return True

    def _open(self, task: Task) -> None:
        other = self.opened.setdefault((task.edge, task.microbatch), task)
        if other.kind is not task.kind:
            send = task if task.kind is Kind.SEND else other
            self.end[task] = self.end[other] = self.now + self.latency(send)

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        return tuple(
            tuple(Span(task, self.start[task], self.end[task]) for task in tasks) for tasks in self.program.ranks
        )

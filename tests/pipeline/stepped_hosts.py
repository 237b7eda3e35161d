"""Ranks that share hosts, simulated by looking at all of them at every moment: slow, and what the other must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from smp_tf.pipeline.programs.dependencies import dependencies
from smp_tf.pipeline.programs.replay import Span
from smp_tf.pipeline.programs.shared_host import Sharing
from smp_tf.pipeline.task import Edge, Kind, Program, Task


class SteppedHosts:
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

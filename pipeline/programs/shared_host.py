r"""Simulates a program whose ranks share the processors of a host, so that a task is faster while others wait.

    rank 0   |-- F0 --|- F1 -|          |---- B0 ----|--- B1 ---|
    rank 1            |- F0 -|--- B0 ---|-- F1 --|--- B1 ---|
                      both compute       B alone: faster

Two measurements of a task say how much it needs of its host: one next to as many tasks as share the host, and one
alone. The less it gains when it is alone, the less it needs. As long as the running tasks need no more than there is,
each has the pace that it has alone. Else all slow down by the same factor (processor sharing).

Source: Kleinrock, "Queueing Systems", volume 2 (1976), section 4.4, with several processors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from smp_tf.pipeline.collection import collection_put_off
from smp_tf.pipeline.programs.chunk_times import TaskTimes, Times, times_per_chunk
from smp_tf.pipeline.programs.dependencies import Dependencies, dependencies
from smp_tf.pipeline.programs.kinds import KINDS, duration
from smp_tf.pipeline.programs.replay import Span
from smp_tf.pipeline.programs.simulate import SimulatedStep, latency_of, waits_forever
from smp_tf.pipeline.programs.walk import Walk
from smp_tf.pipeline.task import Edge, Kind, Program, Task

#: What happens at a moment.
_ARRIVAL, _END = 0, 1


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which ranks of a program share a host, and what their tasks gain while the other ranks wait.

    Attributes:
        hosts: the number of each rank's host.
        forward: the share of its time next to all ranks of its host that a forward task takes alone; above 0, at most
            1.
        backward: the same for backward tasks.

    Example:
        >>> Sharing(hosts=(0, 0), forward=1.0, backward=0.5)
        Sharing(hosts=(0, 0), forward=1.0, backward=0.5)
    """

    hosts: tuple[int, ...]
    forward: float
    backward: float

    def of(self, task: Task) -> float:
        """Returns the share of its time next to others that a task takes alone."""
        match KINDS[task.kind].alone:
            case "forward":
                return self.forward
            case "backward":
                return self.backward
            case None:
                return 1.0


@collection_put_off()
def simulate_on_hosts(
    program: Program,
    times: Times,
    edges: Sequence[Edge] | None,
    sharing: Sharing,
    *,
    comm: float | Mapping[int, float] = 0.0,
    once: Mapping[Task, float] | None = None,
) -> SimulatedStep:
    """Simulates what would run when, where ranks share hosts.

    Args:
        program: a program with or without transfers.
        times: task times of every chunk, or one for all, each next to as many tasks like it as its host has ranks.
        edges: the edges that its SEND and RECV tasks name; None for a program without transfers.
        sharing: which ranks share a host, and what they gain alone.
        comm: how long a message takes, in the unit of `times`: one number, or one per edge index.
        once: how long tasks take that run once per step, such as REDUCE. What ranks do with other replicas takes
            nothing of their host.

    Returns:
        The timeline.

    Raises:
        ProgramError: ranks wait for each other forever.
        ScheduleError: there are not as many times as chunks, or times per edge lack an edge.

    Example:
        >>> from smp_tf.pipeline.schedules.schedule import build
        >>> from smp_tf.pipeline.programs.chunk_times import ChunkTimes
        >>> sharing = Sharing(hosts=(0, 0), forward=0.5, backward=0.5)
        >>> simulate_on_hosts(build("simple", stages=2, microbatches=1), ChunkTimes(), None, sharing).step_time
        3.0
    """
    known = TaskTimes(times_per_chunk(times, program.chunks), once or {})
    return _Hosts(program, dependencies(program, edges), duration(known), latency_of(comm, edges), sharing).run()


class _Host:
    """The ranks of a host, which all go on at one pace.

    A rank's task ends when the host has gone on for a number of seconds of that rank's time alone. That number is the
    same whatever the pace becomes. So the task that ends next is always the first of a heap.

    Args:
        ranks: how many ranks share the host.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        #: The share of their pace alone at which ranks go on, since when, and how far they had come by then.
        self.pace, self.since, self.come = 1.0, 0.0, 0.0
        #: How far the host has come when a rank is done, and the rank.
        self.running: list[tuple[float, int]] = []
        self.share: dict[int, float] = {}
        self.shares: Counter[float] = Counter()

    def begin(self, rank: int, now: float, seconds: float, share: float) -> None:
        """Begins a rank's task, given its seconds alone and which share they are of its seconds next to all others."""
        heappush(self.running, (self._come(now) + seconds, rank))
        self.share[rank] = share
        self.shares[share] += 1
        self._set_pace(now)

    def end(self, now: float) -> list[int]:
        """Removes the ranks that are done at a moment, and returns them."""
        done = []
        while self.running and self._moment(self.running[0][0]) <= now:
            done.append(heappop(self.running)[1])
            self.shares[self.share.pop(done[-1])] -= 1
        if done:
            self._set_pace(now)
        return done

    def next_end(self) -> float | None:
        """Returns when the next rank is done if none begins a task; None where none runs a task."""
        return self._moment(self.running[0][0]) if self.running else None

    def _come(self, now: float) -> float:
        return self.come + (now - self.since) * self.pace

    def _moment(self, come: float) -> float:
        # Not before the pace was set, which rounding could give.
        return self.since + max(0.0, come - self.come) / self.pace

    def _set_pace(self, now: float) -> None:
        needed = sum(count / (self.ranks * share) for share, count in self.shares.items())
        pace = 1.0 / max(1.0, needed)
        if pace != self.pace:
            self.come, self.since, self.pace = self._come(now), now, pace


class _Hosts(Walk):
    """The state at one moment, and how it goes on to the next moment at which something ends or arrives."""

    def __init__(
        self,
        program: Program,
        depends: Dependencies,
        duration: Callable[[Task], float],
        latency: Callable[[Task], float],
        sharing: Sharing,
    ) -> None:
        super().__init__(program, depends, latency)
        self.duration, self.sharing = duration, sharing
        self.now = 0.0
        self.hosts = {host: _Host(ranks) for host, ranks in Counter(sharing.hosts).items()}
        #: The hosts on which something began or ended at this moment.
        self.changed: set[int] = set()
        #: When each lane is free, other than those of the ranks themselves.
        self.free_at = [0.0] * len(self.lanes)
        #: When something of a host ends, as far as was known then, and when something that a lane needs arrives.
        self.moments: list[tuple[float, int, int]] = []

    def run(self) -> SimulatedStep:
        while True:
            self._go_on()
            for host in self.changed:
                end = self.hosts[host].next_end()
                if end is not None:
                    heappush(self.moments, (end, _END, host))
            self.changed.clear()
            if not self.moments:
                return self._timeline()
            self.now = self.moments[0][0]
            while self.moments and not self.moments[0][0] > self.now:
                _, what, of = heappop(self.moments)
                if what == _ARRIVAL:
                    self._take_up(of)
                else:
                    self._end_on(of)

    def _end_on(self, host: int) -> None:
        # There are none where a task that began meanwhile slowed them down. Then they end at another moment.
        for rank in self.hosts[host].end(self.now):
            self._ends(self.lanes[rank][self.at[rank]], self.now)
            self.at[rank] += 1
            self._take_up(rank)
            self.changed.add(host)

    def _advance(self, lane: int, number: int) -> bool:
        task = self.tasks[number]
        if task.kind is Kind.RECV:
            self._open_receive(number, self.now)
            return True
        rank = self.rank_of(lane)
        is_aside = lane >= self.program.stages
        # What goes on next to a rank's tasks may have begun within one that has ended now.
        ready = self._ready(lane, number, self.free_at[lane] if is_aside else self.now)
        if ready is None:
            return False
        if task.kind is Kind.SEND:
            self._open_send(number, self.now)
            return True
        if is_aside:
            self.start[number] = ready
            self.free_at[lane] = ready + self.duration(task)
            self._ends(number, self.free_at[lane])
            return True
        if ready > self.now:
            heappush(self.moments, (ready, _ARRIVAL, lane))
            return False
        self.start[number] = self.now
        host, share = self.sharing.hosts[rank], self.sharing.of(task)
        self.hosts[host].begin(rank, self.now, self.duration(task) * share, share)
        self.changed.add(host)
        return False

    def _timeline(self) -> SimulatedStep:
        spans: list[list[Span]] = []
        for rank, tasks in enumerate(self.program.ranks):
            spans.append([])
            for position, task in enumerate(tasks):
                start, end = self.start[self.first[rank] + position], self.end[self.first[rank] + position]
                if start is None or end is None:
                    raise waits_forever(self.program, rank, position)
                spans[-1].append(Span(task, start, end))
        return SimulatedStep(self.program, tuple(map(tuple, spans)))

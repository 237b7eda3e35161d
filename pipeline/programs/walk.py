r"""Goes through the lists of all ranks, through each as far as possible.

SEND and RECV take a rank no time. They open one end of a transfer. It moves when both ends are open (a rendezvous), and
ends a latency later:

    rank 0   |--- F0 ---| S0.0 opens
                              \ latency
    rank 1   |-- B --| R0.0 opened earlier, finished here, its reader may start

What a rank does with other replicas has its own lane: one such task after the other, each as soon as it has what it
needs, while the rank goes on with its list. A task that keeps nothing busy has a lane for itself.

A rank may wait for something whose end is not known yet. It is taken up again when that end is known, and no earlier.
So no task is tried more often when there are many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import pairwise

from smp_tf.pipeline.programs.dependencies import Dependencies
from smp_tf.pipeline.programs.kinds import KINDS, Busy
from smp_tf.pipeline.task import Program, Task


class Walk(ABC):
    """The state of all ranks. Tasks are numbers here, as in `Dependencies`.

    Args:
        program: the lists to go through.
        depends: what its tasks depend on, from `dependencies`.
        latency: returns the time between a task and a dependent of it on another rank. It is asked about SEND tasks,
            and about compute tasks that another rank's compute task depends on.
    """

    def __init__(self, program: Program, depends: Dependencies, latency: Callable[[Task], float]) -> None:
        self.program = program
        self.tasks, self.first, self.needs = depends.tasks, depends.first, depends.needs
        self.latency = latency
        #: The numbers of each lane: first of what the ranks do themselves, then of what goes on next to that.
        self.lanes, self.rank_of_lane = self._lanes()
        #: The position of each lane.
        self.at = [0] * len(self.lanes)
        # A task that the program lacks never starts.
        self.start: list[float | None] = [None] * len(self.tasks)
        #: The ends of tasks that have ended, and of transfers whose two ends are open.
        self.end: list[float | None] = [None] * len(self.tasks)
        #: The RECV of a SEND, once it is open.
        self._receive_of: dict[int, int] = {}
        #: Of what begins within the last task that it needs: that task's number, and which share of it has to be done.
        self._early = self._begun_early()
        self._able = deque(range(len(self.lanes)))
        #: The lanes whose next task needs a task, by that task.
        self._waiting: dict[int, list[int]] = {}

    def _lanes(self) -> tuple[list[list[int]], list[int]]:
        """Returns the numbers of each lane, and each lane's rank. The first lanes are the ranks themselves."""
        busy = {kind: row.busy for kind, row in KINDS.items()}
        own: list[list[int]] = []
        more: list[tuple[int, list[int]]] = []
        for rank, (first, last) in enumerate(pairwise(self.first)):
            line = [number for number in range(first, last) if busy[self.tasks[number].kind] is Busy.LINE]
            aside = [number for number in range(first, last) if busy[self.tasks[number].kind] is Busy.NOTHING]
            elsewhere = {*line, *aside}
            own.append([number for number in range(first, last) if number not in elsewhere])
            more += [(rank, line)] if line else []
            more += [(rank, [number]) for number in aside]
        return own + [lane for _, lane in more], [*range(len(own)), *(rank for rank, _ in more)]

    def _begun_early(self) -> dict[int, tuple[int, float]]:
        """Returns the tasks whose bucket is whole before the last task that adds to it ends."""
        shares = {(bucket.stage, bucket.number): bucket.share for bucket in self.program.buckets if bucket.share < 1}
        return {
            number: (max(self.needs[number]), shares[task.chunk, task.bucket])
            for number, task in enumerate(self.tasks[: self.first[-1]])
            if KINDS[task.kind].begins_early
            and task.bucket is not None
            and (task.chunk, task.bucket) in shares
            and self.needs[number]
        }

    def rank_of(self, lane: int) -> int:
        """Returns the rank that a lane is of."""
        return self.rank_of_lane[lane]

    @abstractmethod
    def _advance(self, lane: int, number: int) -> bool:
        """Takes the next task of a lane. Returns False when it cannot go on; something takes the lane up later."""

    def _go_on(self) -> None:
        """Goes on with every lane that can."""
        while self._able:
            lane = self._able.popleft()
            numbers, at = self.lanes[lane], self.at[lane]
            while at < len(numbers) and self._advance(lane, numbers[at]):
                at += 1
            self.at[lane] = at

    def _take_up(self, lane: int) -> None:
        self._able.append(lane)

    def _ready(self, lane: int, number: int, moment: float) -> float | None:
        """Returns when all that a task needs is there; None while this is unknown, and then the rank waits."""
        first = self.first[self.rank_of(lane)]
        last, share = self._early.get(number, (None, 1.0))
        for need in self.needs[number]:
            ended = self.end[need]
            if ended is None:
                self._wait(lane, need)
                return None
            if need == last:
                begun = self.start[need]
                assert begun is not None
                ended = begun + share * (ended - begun)
            if not first <= need < number:
                ended += self.latency(self.tasks[need])
            if ended > moment:
                moment = ended
        return moment

    def _open_receive(self, number: int, moment: float) -> None:
        self.start[number] = moment
        (send,) = self.needs[number]
        self._receive_of[send] = number
        if self.start[send] is not None:
            self._moves(send, number)

    def _open_send(self, number: int, moment: float) -> None:
        self.start[number] = moment
        receive = self._receive_of.get(number)
        if receive is not None:
            self._moves(number, receive)

    def _moves(self, send: int, receive: int) -> None:
        """Ends both tasks of a transfer whose two ends are open."""
        opened, other = self.start[send], self.start[receive]
        assert opened is not None
        assert other is not None
        arrived = max(opened, other) + self.latency(self.tasks[send])
        self._ends(send, arrived)
        self._ends(receive, arrived)

    def _ends(self, number: int, moment: float) -> None:
        self.end[number] = moment
        self._able.extend(self._waiting.pop(number, ()))

    def _wait(self, lane: int, number: int) -> None:
        self._waiting.setdefault(number, []).append(lane)

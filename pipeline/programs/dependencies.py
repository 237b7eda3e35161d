"""What each task of a program has to wait for.

    F(chunk - 1) --> F(chunk) ------------------> F(chunk + 1)
                        |  stash
                        v
    B(chunk - 1) <-- B(chunk) <------------------ B(chunk + 1)

With edges, the arrows between ranks are the program's own transfers: maker --> SEND --> RECV -->
reader, and nothing else. Without, each chunk needs the one before it in every sweep.

Tasks are numbers here, in the order of the lists, rank after rank: a list of what a number needs
is read far faster than a table of tasks, most of all where it is larger than the caches of a
processor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.task import Edge, Kind, Program, Task, goes_down


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What each task of a program needs finished before it starts.

    Attributes:
        tasks: the task of each number: those of the lists, rank after rank, and behind them those
            that the program lacks although something needs them.
        first: the number of the first task of each rank; the last entry is how many tasks the lists have.
        needs: the numbers of what each task of the lists needs.
    """

    tasks: Sequence[Task]
    first: Sequence[int]
    needs: Sequence[tuple[int, ...]]

    def by_task(self) -> Mapping[Task, tuple[Task, ...]]:
        """Returns what each task of the lists needs, by the tasks themselves."""
        tasks = self.tasks
        return {tasks[at]: tuple(tasks[need] for need in needs) for at, needs in enumerate(self.needs)}


def dependencies(program: Program, edges: Sequence[Edge] | None = None) -> Dependencies:
    """Returns the tasks that each task of a program needs finished before it starts.

    Args:
        program: any program, also one that cannot run.
        edges: the edges its SEND and RECV tasks name; None for a program without transfers, whose
            chunks are taken to form a chain.

    Returns:
        For each task of the program, what it needs; tasks the program lacks are named too.

    Raises:
        ProgramError: the program has transfers and no edges are given, or a transfer of an edge
            that is not given.

    Example:
        >>> from smp_tf.pipeline.task import parse_program
        >>> dependencies(parse_program("0F0 0B0")).needs
        [(), (0,)]
    """
    finder = _Finder(program, edges)
    needs = [finder.of(rank, task) for rank, tasks in enumerate(program.ranks) for task in tasks]
    return Dependencies(finder.tasks, [0, *accumulate(map(len, program.ranks))], needs)


class _Finder:
    """Where what a task may need stands in the lists."""

    def __init__(self, program: Program, edges: Sequence[Edge] | None) -> None:
        self.program = program
        self.tasks = list(chain.from_iterable(program.ranks))
        self.lacking: dict[Task, int] = {}
        self.edge_of = None if edges is None else {edge.index: edge for edge in edges}
        #: By chunk and sweep, and then by microbatch.
        self.pieces: dict[tuple[int, int | None], dict[int | None, tuple[int, ...]]] = defaultdict(dict)
        #: By edge and chunk, and then by microbatch.
        self.sends: dict[tuple[int | None, int], dict[int | None, int]] = defaultdict(dict)
        self.receives: dict[tuple[int | None, int], dict[int | None, int]] = defaultdict(dict)
        self.reduces: dict[int, list[int]] = defaultdict(list)
        for number, task in enumerate(self.tasks):
            kind = task.kind
            if kind.is_compute:
                pieces = self.pieces[task.chunk, task.sweep]
                before = pieces.get(task.microbatch)
                pieces[task.microbatch] = (number,) if before is None else self._sorted((*before, number))
            elif kind.is_transfer:
                ends = self.sends if kind is Kind.SEND else self.receives
                ends[task.edge, task.chunk][task.microbatch] = number
            elif kind is Kind.REDUCE:
                self.reduces[task.chunk].append(number)
        placement = program.placement()
        self.read: dict[tuple[int, int | None], list[Edge]] = defaultdict(list)
        self.local: dict[tuple[int, int | None], list[Edge]] = defaultdict(list)
        self.step_results: dict[int, list[Edge]] = defaultdict(list)
        for edge in edges or ():
            if placement[edge.src_chunk] == placement[edge.dst_chunk]:
                if edge.dst_sweep is not None:
                    self.local[edge.dst_chunk, edge.dst_sweep].append(edge)
            elif edge.dst_sweep is not None:
                self.read[edge.dst_chunk, edge.dst_sweep].append(edge)
            elif edge.per == "step":
                self.step_results[edge.dst_chunk].append(edge)

    def of(self, rank: int, task: Task) -> tuple[int, ...]:
        """The numbers of what a task of a rank needs."""
        if task.kind.is_compute:
            return self._of_compute(task)
        if task.kind.is_transfer:
            return self._of_transfer(rank, task)
        if task.kind in (Kind.REDUCE, Kind.APPLY):
            return self._of_update(task)
        return ()

    def _sorted(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(numbers, key=lambda number: self.tasks[number].kind.value))

    def _lacking(self, task: Task) -> int:
        """The number of a task that the program lacks."""
        if task not in self.lacking:
            self.lacking[task] = len(self.tasks)
            self.tasks.append(task)
        return self.lacking[task]

    def _of_compute(self, task: Task) -> tuple[int, ...]:
        chunk, sweep, microbatch = task.chunk, task.sweep, task.microbatch
        assert sweep is not None
        assert microbatch is not None
        if task.kind is Kind.W:
            pieces = self._finished(chunk, sweep, microbatch)
            first = next((number for number in pieces if self.tasks[number].kind is Kind.I), None)
            return (self._lacking(Task(Kind.I, chunk, microbatch)) if first is None else first,)
        needed = self._finished(chunk, sweep - 1, microbatch) if sweep > 0 else ()
        if self.edge_of is None:
            before = chunk + 1 if goes_down(sweep) else chunk - 1
            if 0 <= before < self.program.chunks:
                needed += (self._first(before, sweep, microbatch),)
            return needed
        for edge in self.read.get((chunk, sweep), ()):
            needed += (self._receive(edge, microbatch if edge.per == "microbatch" else None),)
        for edge in self.local.get((chunk, sweep), ()):
            needed += self._makers(edge, microbatch if edge.per == "microbatch" else None)
        return needed

    def _of_transfer(self, rank: int, task: Task) -> tuple[int, ...]:
        if self.edge_of is None:
            raise ProgramError(
                "A program with transfers is read together with its edges. Received: task "
                f"{task} on rank {rank}, and no edges. Pass the edges given to add_transfers"
            )
        assert task.edge is not None
        edge = self.edge_of.get(task.edge)
        if edge is None:
            raise ProgramError(
                f"A transfer names one of the edges {sorted(self.edge_of)}. Received: task {task} on rank {rank}"
            )
        if task.kind is Kind.SEND:
            return self._makers(edge, task.microbatch)
        send = self.sends[edge.index, edge.src_chunk].get(task.microbatch)
        if send is None:
            send = self._lacking(Task(Kind.SEND, edge.src_chunk, task.microbatch, edge=edge.index))
        return (send,)

    def _receive(self, edge: Edge, microbatch: int | None) -> int:
        receive = self.receives[edge.index, edge.dst_chunk].get(microbatch)
        if receive is None:
            receive = self._lacking(Task(Kind.RECV, edge.dst_chunk, microbatch, edge=edge.index))
        return receive

    def _of_update(self, task: Task) -> tuple[int, ...]:
        """An update comes after all gradients, those of other ranks too; APPLY after REDUCE."""
        needed = list(self._finished_with_all(task.chunk, self.program.sweeps - 1))
        needed += [self._receive(edge, None) for edge in self.step_results[task.chunk]]
        if task.kind is Kind.APPLY:
            buckets = (None, task.bucket)
            needed += [
                number
                for number in self.reduces[task.chunk]
                if task.bucket is None or self.tasks[number].bucket in buckets
            ]
        return tuple(needed)

    def _makers(self, edge: Edge, microbatch: int | None) -> tuple[int, ...]:
        if edge.src_sweep is None:
            return ()
        if microbatch is None:
            return self._finished_with_all(edge.src_chunk, edge.src_sweep)
        if edge.dst_sweep == edge.src_sweep:
            return (self._first(edge.src_chunk, edge.src_sweep, microbatch),)
        return self._finished(edge.src_chunk, edge.src_sweep, microbatch)

    def _finished_with_all(self, chunk: int, sweep: int) -> tuple[int, ...]:
        every = range(self.program.microbatches)
        return tuple(chain.from_iterable(self._finished(chunk, sweep, each) for each in every))

    def _first(self, chunk: int, sweep: int, microbatch: int) -> int:
        """The task that makes what the next chunk of the sweep needs: of I and W it is I."""
        return self._finished(chunk, sweep, microbatch)[0]

    def _finished(self, chunk: int, sweep: int, microbatch: int) -> tuple[int, ...]:
        """The tasks after which a chunk is done with a microbatch of a sweep."""
        present = self.pieces[chunk, sweep].get(microbatch)
        if present is not None:
            return present
        if sweep < 2:
            return (self._lacking(Task(Kind.F if sweep == 0 else Kind.B, chunk, microbatch)),)
        return (self._lacking(Task(Kind.T, chunk, microbatch, sweep=sweep)),)

"""Finds where tasks are in the lists of a program, and so what a task of each sort has to wait for.

Tasks are numbers here, in the order of the lists, rank after rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.task import BucketMakers, Edge, Kind, Program, Task, goes_down


class Places:
    """The places in the lists of all that a task may need.

    Args:
        program: any program, even one that cannot run.
        edges: the edges that its SEND and RECV tasks name; None for a program without transfers.
    """

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
        #: For tasks that are done for all of a rank: by the task, and by its kind and stage.
        self.once: dict[Task, int] = {}
        self.of_kind: dict[tuple[Kind, int], list[int]] = defaultdict(list)
        for number, task in enumerate(self.tasks):
            kind = task.kind
            if kind.is_compute:
                pieces = self.pieces[task.chunk, task.sweep]
                before = pieces.get(task.microbatch)
                pieces[task.microbatch] = (number,) if before is None else self._sorted((*before, number))
            elif kind.is_transfer:
                ends = self.sends if kind is Kind.SEND else self.receives
                ends[task.edge, task.chunk][task.microbatch] = number
            elif kind.is_of_stage:
                self.once[task] = number
                self.of_kind[kind, task.chunk].append(number)
        placement = program.placement()
        self.chunks_of: list[list[int]] = [[] for _ in program.ranks]
        for each, rank in enumerate(placement):
            self.chunks_of[rank].append(each)
        self.makers = {(bucket.stage, bucket.number): bucket for bucket in program.buckets}
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

    def of_nothing(self, rank: int, task: Task) -> tuple[int, ...]:
        """Returns no numbers, for a task that needs nothing."""
        return ()

    def _sorted(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(numbers, key=lambda number: self.tasks[number].kind.word))

    def _lacking(self, task: Task) -> int:
        """Returns the number of a task that the program lacks."""
        if task not in self.lacking:
            self.lacking[task] = len(self.tasks)
            self.tasks.append(task)
        return self.lacking[task]

    def of_others(self, rank: int, task: Task) -> tuple[int, ...]:
        """Returns what a task of the first rank needs: those of its kind on all other ranks, which need nothing."""
        if rank > 0:
            return ()
        others = [Task(task.kind, other, bucket=task.bucket) for other in range(1, self.program.stages)]
        return tuple(self.number_of(other) for other in others)

    def number_of(self, task: Task) -> int:
        """Returns the number of a task that runs once per step, even of one that the program lacks."""
        number = self.once.get(task)
        return self._lacking(task) if number is None else number

    def of_compute(self, rank: int, task: Task) -> tuple[int, ...]:
        """Returns what a task needs that runs a segment of a chunk in a sweep."""
        chunk, sweep, microbatch = task.chunk, task.sweep, task.microbatch
        assert sweep is not None
        assert microbatch is not None
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

    def of_weight_gradients(self, rank: int, task: Task) -> tuple[int, ...]:
        """Returns what the second part of a backward needs: the first."""
        assert task.sweep is not None
        assert task.microbatch is not None
        pieces = self._finished(task.chunk, task.sweep, task.microbatch)
        first = next((number for number in pieces if self.tasks[number].kind is Kind.I), None)
        return (self._lacking(Task(Kind.I, task.chunk, task.microbatch)) if first is None else first,)

    def of_send(self, rank: int, task: Task) -> tuple[int, ...]:
        """Returns what a SEND needs: the maker of its tensor."""
        return self._makers(self._edge(rank, task), task.microbatch)

    def of_receive(self, rank: int, task: Task) -> tuple[int, ...]:
        """Returns what a RECV needs: the SEND at the other end."""
        edge = self._edge(rank, task)
        send = self.sends[edge.index, edge.src_chunk].get(task.microbatch)
        if send is None:
            send = self._lacking(Task(Kind.SEND, edge.src_chunk, task.microbatch, edge=edge.index))
        return (send,)

    def _edge(self, rank: int, task: Task) -> Edge:
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
        return edge

    def _receive(self, edge: Edge, microbatch: int | None) -> int:
        receive = self.receives[edge.index, edge.dst_chunk].get(microbatch)
        if receive is None:
            receive = self._lacking(Task(Kind.RECV, edge.dst_chunk, microbatch, edge=edge.index))
        return receive

    def of_gradients(self, rank: int, task: Task) -> tuple[int, ...]:
        """Returns what a task needs that reads gradients, with what other ranks add to these.

        These are the tasks for its bucket, where the program says what makes it; else all tasks of the rank.
        """
        makers = None if task.bucket is None else self.makers.get((rank, task.bucket))
        if makers is not None:
            return self._of_bucket(makers)
        chunks = self.chunks_of[rank]
        needed = [number for chunk in chunks for number in self._finished_with_all(chunk, self.program.sweeps - 1)]
        needed += [self._receive(edge, None) for chunk in chunks for edge in self.step_results[chunk]]
        return tuple(needed)

    def _of_bucket(self, makers: BucketMakers) -> tuple[int, ...]:
        whole = {(chunk, sweep) for chunk, sweep, _ in makers.segments}
        numbers = [number for chunk, sweep in sorted(whole) for number in self._finished_with_all(chunk, sweep)]
        needed = [number for number in numbers if makers.is_made_by(self.tasks[number])]
        assert self.edge_of is not None or not makers.edges
        for edge in (self.edge_of[index] for index in sorted(makers.edges)) if self.edge_of else ():
            every = range(self.program.microbatches) if edge.per == "microbatch" else (None,)
            needed += [self._receive(edge, each) for each in every]
        return tuple(needed)

    def of_bucket(self, kind: Kind, task: Task) -> tuple[int, ...]:
        """Returns the tasks of a kind for the bucket of a task; all of its stage where the task names no bucket."""
        own = self.of_kind[kind, task.chunk]
        return tuple(n for n in own if task.bucket is None or self.tasks[n].bucket in (None, task.bucket))

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
        """Returns the task that makes what the next chunk of the sweep needs. Of I and W it is I."""
        return self._finished(chunk, sweep, microbatch)[0]

    def _finished(self, chunk: int, sweep: int, microbatch: int) -> tuple[int, ...]:
        """Returns the tasks after which a chunk is done with a microbatch of a sweep."""
        present = self.pieces[chunk, sweep].get(microbatch)
        if present is not None:
            return present
        if sweep < 2:
            return (self._lacking(Task(Kind.F if sweep == 0 else Kind.B, chunk, microbatch)),)
        return (self._lacking(Task(Kind.T, chunk, microbatch, sweep=sweep)),)

"""What each task of a program has to wait for.

    F(chunk - 1) --> F(chunk) ------------------> F(chunk + 1)
                        |  stash
                        v
    B(chunk - 1) <-- B(chunk) <------------------ B(chunk + 1)

With edges, the arrows between ranks are the program's own transfers: maker --> SEND --> RECV -->
reader, and nothing else. Without, each chunk needs the one before it in every sweep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.task import Edge, Kind, Program, Task, goes_down


def dependencies(program: Program, edges: Sequence[Edge] | None = None) -> Mapping[Task, tuple[Task, ...]]:
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
    """
    return _Dependencies(program, edges).all()


class _Dependencies:
    def __init__(self, program: Program, edges: Sequence[Edge] | None) -> None:
        self.program = program
        self.edge_of = None if edges is None else {edge.index: edge for edge in edges}
        self.pieces: dict[tuple[int, int, int], list[Task]] = defaultdict(list)
        for tasks in program.ranks:
            for task in tasks:
                if task.kind.is_compute:
                    assert task.sweep is not None
                    assert task.microbatch is not None
                    self.pieces[task.chunk, task.sweep, task.microbatch].append(task)
        placement = program.placement()
        self.read: dict[tuple[int, int], list[Edge]] = defaultdict(list)
        self.local: dict[tuple[int, int], list[Edge]] = defaultdict(list)
        self.step_results: dict[int, list[Edge]] = defaultdict(list)
        for edge in edges or ():
            if placement[edge.src_chunk] == placement[edge.dst_chunk]:
                if edge.dst_sweep is not None:
                    self.local[edge.dst_chunk, edge.dst_sweep].append(edge)
            elif edge.dst_sweep is not None:
                self.read[edge.dst_chunk, edge.dst_sweep].append(edge)
            elif edge.per == "step":
                self.step_results[edge.dst_chunk].append(edge)

    def all(self) -> dict[Task, tuple[Task, ...]]:
        return {task: tuple(self._of(rank, task)) for rank, tasks in enumerate(self.program.ranks) for task in tasks}

    def _of(self, rank: int, task: Task) -> Iterator[Task]:
        if task.kind.is_compute:
            yield from self._of_compute(task)
        elif task.kind.is_transfer:
            yield from self._of_transfer(rank, task)
        elif task.kind in (Kind.REDUCE, Kind.APPLY):
            yield from self._of_update(task)

    def _of_compute(self, task: Task) -> Iterator[Task]:
        sweep, microbatch = task.sweep, task.microbatch
        assert sweep is not None
        assert microbatch is not None
        if task.kind is Kind.W:
            yield Task(Kind.I, task.chunk, microbatch)
            return
        if sweep > 0:
            yield from self._finished(task.chunk, sweep - 1, microbatch)
        if self.edge_of is None:
            before = task.chunk + 1 if goes_down(sweep) else task.chunk - 1
            if 0 <= before < self.program.chunks:
                yield self._first(before, sweep, microbatch)
            return
        for edge in self.read[task.chunk, sweep]:
            yield Task(
                Kind.RECV,
                task.chunk,
                microbatch if edge.per == "microbatch" else None,
                edge=edge.index,
            )
        for edge in self.local[task.chunk, sweep]:
            yield from self._makers(edge, microbatch if edge.per == "microbatch" else None)

    def _of_transfer(self, rank: int, task: Task) -> Iterator[Task]:
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
            yield from self._makers(edge, task.microbatch)
        else:
            yield Task(Kind.SEND, edge.src_chunk, task.microbatch, edge=edge.index)

    def _of_update(self, task: Task) -> Iterator[Task]:
        """An update comes after all gradients, those of other ranks too; APPLY after REDUCE."""
        for microbatch in range(self.program.microbatches):
            yield from self._finished(task.chunk, self.program.sweeps - 1, microbatch)
        for edge in self.step_results[task.chunk]:
            yield Task(Kind.RECV, task.chunk, edge=edge.index)
        if task.kind is Kind.APPLY:
            for tasks in self.program.ranks:
                for other in tasks:
                    if (
                        other.kind is Kind.REDUCE
                        and other.chunk == task.chunk
                        and (task.bucket is None or other.bucket in (None, task.bucket))
                    ):
                        yield other

    def _makers(self, edge: Edge, microbatch: int | None) -> Iterator[Task]:
        if edge.src_sweep is None:
            return
        if microbatch is None:
            for each in range(self.program.microbatches):
                yield from self._finished(edge.src_chunk, edge.src_sweep, each)
        elif edge.dst_sweep == edge.src_sweep:
            yield self._first(edge.src_chunk, edge.src_sweep, microbatch)
        else:
            yield from self._finished(edge.src_chunk, edge.src_sweep, microbatch)

    def _first(self, chunk: int, sweep: int, microbatch: int) -> Task:
        """The task that makes what the next chunk of the sweep needs: of I and W it is I."""
        return self._finished(chunk, sweep, microbatch)[0]

    def _finished(self, chunk: int, sweep: int, microbatch: int) -> list[Task]:
        """The tasks after which a chunk is done with a microbatch of a sweep."""
        present = self.pieces.get((chunk, sweep, microbatch))
        if present:
            return present if len(present) == 1 else sorted(present, key=lambda task: task.kind.value)
        if sweep < 2:
            return [Task(Kind.F if sweep == 0 else Kind.B, chunk, microbatch)]
        return [Task(Kind.T, chunk, microbatch, sweep=sweep)]

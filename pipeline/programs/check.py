"""Proves that a program can run, without running it.

It asks four questions, in this order, since each makes sense only when the answer to the one before is yes. Is every
task there once? Does every rank's list respect what happens on that rank? Do microbatches come in order? Do the ranks
get through their lists without waiting for each other forever?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise

from smp_tf.pipeline.collection import collection_put_off
from smp_tf.pipeline.errors import ProgramError, require_at_least
from smp_tf.pipeline.programs.dependencies import Dependencies, dependencies
from smp_tf.pipeline.programs.replay import Stuck, replay
from smp_tf.pipeline.task import Edge, Kind, Program, Task

_SHOWN_AROUND_MARK = 8


@collection_put_off()
def check(program: Program, edges: Sequence[Edge] | None = None, *, send_buffers: int = 1) -> None:
    """Raises an error that shows the bad step, unless the program can run.

    Args:
        program: the program of one step, of all ranks.
        edges: the edges that its SEND and RECV tasks name; None for a program without transfers, whose chunks are
            assumed to form a chain.
        send_buffers: how many tensors of one edge a sender can hold, times the chunks that the edge crosses. A send
            ends only when its receive is open. So a rank with all buffers of an edge in use stops at its next SEND.

    Raises:
        ScheduleError: send_buffers is less than 1.
        ProgramError: a task is missing, repeated, unknown or on the wrong rank, comes before what
            it depends on, or ranks wait for each other forever. The message holds the lists of
            the ranks, with the bad step marked `>2F0<`.

    Example:
        >>> from smp_tf.pipeline.programs.text import parse_program
        >>> check(parse_program("0F0 0B0"))
    """
    require_at_least(1, "send_buffers", send_buffers)
    placement = program.placement()
    _check_each_task_once(program, edges, placement)
    depends = dependencies(program, edges)
    _check_order_on_each_rank(program, depends)
    _check_microbatches_in_order(program)
    _check_nobody_waits_forever(program, edges, depends, placement, send_buffers)


def _check_each_task_once(program: Program, edges: Sequence[Edge] | None, placement: Sequence[int]) -> None:
    present: set[Task] = set()
    for rank, tasks in enumerate(program.ranks):
        for position, task in enumerate(tasks):
            if task in present:
                raise _error(
                    f"Each task is done once. Received: {task} on rank {rank}, the second one",
                    program,
                    {rank: position},
                )
            if rank != _rank_of(task, placement):
                raise _error(
                    f"A task is done by the rank of its chunk. Received: {task} on rank {rank}",
                    program,
                    {rank: position},
                )
            present.add(task)
    expected = _Expected(program, edges, placement)
    # Each is there once, so the expected number of them is all of them.
    if sum(map(expected.has, present)) < expected.count:
        task = next(task for task in expected.all() if task not in present)
        raise _error(
            f"Every chunk does every microbatch. Received: a program without {task}, which "
            f"belongs on rank {placement[task.chunk]}",
            program,
            {},
            ranks=[placement[task.chunk]],
        )
    for rank, tasks in enumerate(program.ranks):
        for position, task in enumerate(tasks):
            # A transfer of an unknown edge has its own error, in dependencies.
            is_checked = task.kind.is_compute or (edges is not None and task.kind.is_transfer)
            if is_checked and not expected.has(task):
                raise _error(
                    f"A program of {program.chunks} chunks, {program.microbatches} microbatches "
                    f"and {program.sweeps} sweeps does B, or I and W, once each, and the transfers "
                    f"of its edges. Received: {task} on rank {rank}",
                    program,
                    {rank: position},
                )


class _Expected:
    """Tells by a task's numbers whether a program should have it, since making all tasks takes far longer."""

    def __init__(self, program: Program, edges: Sequence[Edge] | None, placement: Sequence[int]) -> None:
        self.program = program
        self.edge_of = {
            edge.index: edge for edge in edges or () if placement[edge.src_chunk] != placement[edge.dst_chunk]
        }
        #: Chunk and microbatch of the backwards that are cut in two.
        self.in_two = {
            (task.chunk, task.microbatch)
            for task in chain.from_iterable(program.ranks)
            if task.kind in (Kind.I, Kind.W) and self.has(task)
        }
        per_step = sum(edge.per == "step" for edge in self.edge_of.values())
        per_microbatch = program.chunks * program.sweeps + 2 * (len(self.edge_of) - per_step)
        self.count = program.microbatches * per_microbatch + 2 * per_step + len(self.in_two)

    def has(self, task: Task) -> bool:
        """Returns whether a task is one of them."""
        program, kind, microbatch = self.program, task.kind, task.microbatch
        if kind.is_transfer:
            edge = None if task.edge is None else self.edge_of.get(task.edge)
            if edge is None or task.chunk != (edge.src_chunk if kind is Kind.SEND else edge.dst_chunk):
                return False
            if edge.per == "step":
                return microbatch is None
        elif not kind.is_compute:
            return False
        elif kind is Kind.B:
            if program.sweeps < 2 or (task.chunk, microbatch) in self.in_two:
                return False
        elif task.sweep is None or task.sweep >= program.sweeps:
            return False
        return microbatch is not None and 0 <= microbatch < program.microbatches and 0 <= task.chunk < program.chunks

    def all(self) -> Iterator[Task]:
        """Yields all of them."""
        for chunk in range(self.program.chunks):
            for microbatch in range(self.program.microbatches):
                yield Task(Kind.F, chunk, microbatch)
                if self.program.sweeps > 1:
                    kinds = (Kind.I, Kind.W) if (chunk, microbatch) in self.in_two else (Kind.B,)
                    yield from (Task(kind, chunk, microbatch) for kind in kinds)
                for sweep in range(2, self.program.sweeps):
                    yield Task(Kind.T, chunk, microbatch, sweep=sweep)
        for edge in self.edge_of.values():
            for each in range(self.program.microbatches) if edge.per == "microbatch" else (None,):
                yield Task(Kind.SEND, edge.src_chunk, each, edge=edge.index)
                yield Task(Kind.RECV, edge.dst_chunk, each, edge=edge.index)


def _check_order_on_each_rank(program: Program, depends: Dependencies) -> None:
    tasks, count = depends.tasks, depends.first[-1]
    for rank, (first, last) in enumerate(pairwise(depends.first)):
        for number in range(first, last):
            for need in depends.needs[number]:
                if need >= count:
                    raise _error(
                        f"{tasks[number]} on rank {rank} needs {tasks[need]}, which no rank does",
                        program,
                        {rank: number - first},
                    )
                if number < need < last:
                    raise _error(
                        "A task comes after what it depends on. Received: "
                        f"{tasks[number]} before {tasks[need]} on rank {rank}",
                        program,
                        {rank: number - first},
                    )


def _check_microbatches_in_order(program: Program) -> None:
    for rank, tasks in enumerate(program.ranks):
        newest: dict[tuple[Kind, int, int | None], int] = {}
        for position, task in enumerate(tasks):
            if not task.kind.is_compute:
                continue
            assert task.microbatch is not None
            key = task.kind, task.chunk, task.sweep
            if task.microbatch < newest.get(key, -1):
                raise _error(
                    "A chunk takes the microbatches of a sweep in order, since what they write "
                    f"(a moving average, a print) has an order too. Received: {task} after "
                    f"microbatch {newest[key]} on rank {rank}",
                    program,
                    {rank: position},
                )
            newest[key] = task.microbatch


def _check_nobody_waits_forever(
    program: Program,
    edges: Sequence[Edge] | None,
    depends: Dependencies,
    placement: Sequence[int],
    send_buffers: int,
) -> None:
    buffers = {edge.index: send_buffers * edge.crosses for edge in edges or ()}
    result = replay(program, depends, lambda _: 1.0, lambda _: 0.0, buffers)
    if not result.stuck:
        return
    lines = [f"  {_reason(program, stuck, placement)}" for stuck in result.stuck]
    raise _error(
        f"Ranks wait for each other forever (with {send_buffers} send buffers per edge and chunk crossed):\n"
        + "\n".join(lines),
        program,
        # Where a rank's line to other replicas waits, too, the rank's own place is marked.
        dict(sorted({stuck.rank: stuck.position for stuck in reversed(result.stuck)}.items())),
    )


def _rank_of(task: Task, placement: Sequence[int]) -> int | None:
    """Returns the rank that does a task; None where its chunk does not exist."""
    if task.kind.is_of_stage:
        return task.chunk
    return placement[task.chunk] if 0 <= task.chunk < len(placement) else None


def _reason(program: Program, stuck: Stuck, placement: Sequence[int]) -> str:
    task = program.ranks[stuck.rank][stuck.position]
    needs = ", ".join(f"{need} of rank {_rank_of(need, placement)}" for need in stuck.needs)
    if task.kind is Kind.RECV or (task.kind is Kind.SEND and stuck.needs[0].kind is Kind.RECV):
        return f"rank {stuck.rank} is through its list, and {task} still waits for {needs}"
    if task.kind is Kind.SEND and stuck.needs[0].kind is Kind.SEND:
        return f"rank {stuck.rank} stands before {task} and waits for the buffer of {needs}"
    return f"rank {stuck.rank} stands before {task} and waits for {needs}"


def _error(rule: str, program: Program, marks: Mapping[int, int], ranks: Sequence[int] = ()) -> ProgramError:
    error = ProgramError(f"{rule}\n{marked(program, marks)}")
    error.ranks = tuple(ranks or marks)
    return error


def marked(program: Program, marks: Mapping[int, int]) -> str:
    """Returns the program as text with steps marked, such as `>2F0<`.

    Args:
        program: the program to show.
        marks: position in the list to mark, per rank. Of a long list only the part around it is shown.

    Returns:
        A line per rank.
    """
    lines = []
    for rank, tasks in enumerate(program.ranks):
        middle = marks.get(rank, 0)
        first = max(0, middle - _SHOWN_AROUND_MARK)
        last = middle + _SHOWN_AROUND_MARK + 1
        words = [f">{task}<" if marks.get(rank) == position else str(task) for position, task in enumerate(tasks)]
        shown = [*(["..."] if first else []), *words[first:last]]
        shown += ["..."] if last < len(words) else []
        lines.append(f"  rank {rank}: {' '.join(shown)}")
    return "\n".join(lines)

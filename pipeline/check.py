"""Proves that a program can run, without running it.

Four questions, in this order, since each makes sense only when the one before is answered yes:
is every task there once; does every rank's list respect what happens on that rank; do microbatches
come in order; and do the ranks, each going through its list, ever wait for each other forever?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from smp_tf.pipeline.dependencies import dependencies
from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.replay import Stuck, replay
from smp_tf.pipeline.task import Edge, Kind, Program, Task

_SHOWN_AROUND_MARK = 8


def check(program: Program, edges: Sequence[Edge] | None = None, *, send_buffers: int = 1) -> None:
    """Raises an error that shows the bad step, unless the program can run.

    Args:
        program: the program of one step, of all ranks.
        edges: the edges its SEND and RECV tasks name; None for a program without transfers, whose
            chunks are taken to form a chain.
        send_buffers: how many tensors of one edge a sender can hold, times the chunks the edge
            crosses. A send is over only when its receive is open, so a rank with all buffers of
            an edge in use stops at its next SEND.

    Raises:
        ProgramError: a task is missing, repeated, unknown or on the wrong rank, comes before what
            it depends on, or ranks wait for each other forever. The message holds the lists of
            the ranks, with the bad step marked `>2F0<`.

    Example:
        >>> from smp_tf.pipeline.task import parse_program
        >>> check(parse_program("0F0 0B0"))
    """
    rank_of = _check_each_task_once(program, edges)
    needs = dependencies(program, edges)
    _check_order_on_each_rank(program, needs, rank_of)
    _check_microbatches_in_order(program)
    _check_nobody_waits_forever(program, edges, needs, rank_of, send_buffers)


def _check_each_task_once(program: Program, edges: Sequence[Edge] | None) -> Mapping[Task, int]:
    placement = program.placement()
    rank_of: dict[Task, int] = {}
    for rank, tasks in enumerate(program.ranks):
        for position, task in enumerate(tasks):
            if task in rank_of:
                raise _error(
                    f"Each task is done once. Received: {task} on rank {rank}, the second one",
                    program,
                    {rank: position},
                )
            if not 0 <= task.chunk < program.chunks or rank != placement[task.chunk]:
                raise _error(
                    f"A task is done by the rank of its chunk. Received: {task} on rank {rank}",
                    program,
                    {rank: position},
                )
            rank_of[task] = rank
    expected = Counter(_expected_compute(program, rank_of))
    expected.update(_expected_transfers(program, edges, placement))
    for task in expected:
        if task not in rank_of:
            raise _error(
                f"Every chunk does every microbatch. Received: a program without {task}, which "
                f"belongs on rank {placement[task.chunk]}",
                program,
                {},
                ranks=[placement[task.chunk]],
            )
    for rank, tasks in enumerate(program.ranks):
        for position, task in enumerate(tasks):
            known = task in expected or not (task.kind.is_compute or task.kind.is_transfer)
            # A transfer nobody can name has its own error, in dependencies.
            if not known and not (edges is None and task.kind.is_transfer):
                raise _error(
                    f"A program of {program.chunks} chunks, {program.microbatches} microbatches "
                    f"and {program.sweeps} sweeps does B, or I and W, once each, and the transfers "
                    f"of its edges. Received: {task} on rank {rank}",
                    program,
                    {rank: position},
                )
    return rank_of


def _expected_compute(program: Program, present: Mapping[Task, int]) -> Iterator[Task]:
    for chunk in range(program.chunks):
        for microbatch in range(program.microbatches):
            yield Task(Kind.F, chunk, microbatch)
            if program.sweeps > 1:
                pieces = [Task(kind, chunk, microbatch) for kind in (Kind.I, Kind.W)]
                if any(piece in present for piece in pieces):
                    yield from pieces
                else:
                    yield Task(Kind.B, chunk, microbatch)
            for sweep in range(2, program.sweeps):
                yield Task(Kind.T, chunk, microbatch, sweep=sweep)


def _expected_transfers(program: Program, edges: Sequence[Edge] | None, placement: Sequence[int]) -> Iterator[Task]:
    for edge in edges or ():
        if placement[edge.src_chunk] == placement[edge.dst_chunk]:
            continue
        for microbatch in range(program.microbatches) if edge.per == "microbatch" else (None,):
            yield Task(Kind.SEND, edge.src_chunk, microbatch, edge=edge.index)
            yield Task(Kind.RECV, edge.dst_chunk, microbatch, edge=edge.index)


def _check_order_on_each_rank(
    program: Program, needs: Mapping[Task, tuple[Task, ...]], rank_of: Mapping[Task, int]
) -> None:
    for rank, tasks in enumerate(program.ranks):
        position_of = {task: position for position, task in enumerate(tasks)}
        for position, task in enumerate(tasks):
            for need in needs[task]:
                if need not in rank_of:
                    raise _error(
                        f"{task} on rank {rank} needs {need}, which no rank does",
                        program,
                        {rank: position},
                    )
                if position_of.get(need, -1) > position:
                    raise _error(
                        f"A task comes after what it depends on. Received: {task} before {need} on rank {rank}",
                        program,
                        {rank: position},
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
    needs: Mapping[Task, tuple[Task, ...]],
    rank_of: Mapping[Task, int],
    send_buffers: int,
) -> None:
    buffers = {edge.index: send_buffers * edge.crosses for edge in edges or ()}
    result = replay(program, needs, lambda _: 1.0, lambda _: 0.0, buffers)
    if not result.stuck:
        return
    lines = [f"  {_reason(program, stuck, rank_of)}" for stuck in result.stuck]
    raise _error(
        f"Ranks wait for each other forever (with {send_buffers} send buffers per edge and chunk crossed):\n"
        + "\n".join(lines),
        program,
        {stuck.rank: stuck.position for stuck in result.stuck},
    )


def _reason(program: Program, stuck: Stuck, rank_of: Mapping[Task, int]) -> str:
    task = program.ranks[stuck.rank][stuck.position]
    needs = ", ".join(f"{need} of rank {rank_of[need]}" for need in stuck.needs)
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
        marks: position in the list to mark, per rank. Of long lists only what is around is shown.

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

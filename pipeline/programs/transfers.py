"""Puts sends and receives into a program of compute tasks."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from smp_tf.pipeline.collection import collection_put_off
from smp_tf.pipeline.errors import ProgramError, require_at_least
from smp_tf.pipeline.programs.dependencies import dependencies
from smp_tf.pipeline.programs.replay import replay
from smp_tf.pipeline.task import Edge, Kind, Program, Task


@collection_put_off()
def add_transfers(program: Program, edges: Sequence[Edge], *, prefetch: int = 1) -> Program:
    """Returns the program with a SEND and a RECV for every transfer edge and microbatch.

    A SEND comes directly after the task that makes the tensor. A RECV comes `prefetch` compute tasks before the
    receiving chunk's task of that sweep, so that the message travels while another task computes. Both only start a
    transfer. The reader waits for the message. For 2 stages and 2 microbatches, edge 0 from F to F, edge 1 from B to B:

        rank 0      F0 S0.0 R1.0 F1 S0.1 R1.1 B0 B1
        rank 1 R0.0 F0 R0.1 B0 S1.0 F1 B1 S1.1

    R0.1 (edge 0, microbatch 1) is open while B0 computes, so that F1 need not wait for it. A rank
    holds at most prefetch + 1 tensors of an edge that are not read yet, however many microbatches
    there are.

    The receiving chunk may run its task of the maker's sweep before the maker does, as when the last chunk sends its
    loss. Then the RECV comes directly after that task. The reader comes a sweep later, and the tensor is part of the
    receiver's stash until then. A result of the step has no reader at all and is kept to the end.

    A sender holds one tensor of an edge per chunk that the edge crosses. With one chunk per rank no
    rank runs farther ahead of another. With several one may: then a RECV is opened earlier, when
    the sender makes the tensor that needs its buffer, all tasks being as long as one would expect.
    So in that step no rank waits for a buffer, and since each goes through its list whatever the
    times are, in no other step do ranks wait for each other because their buffers are full.

    A tensor that is sent once per step goes before its reader's first microbatch, or after its maker's last one. A
    result, such as what one stage adds to the gradient of another stage's weight, is asked for before the receiver's
    last task of the maker's sweep. So nothing comes after that task, and the receiver may hand on what it makes while
    it still computes.

    Args:
        program: compute tasks only, as `build` returns it.
        edges: the edges whose tensors have to move. Edges between two chunks of one rank need no transfer and get none.
        prefetch: how many compute tasks before its reader a tensor is asked for, 0 or more.

    Returns:
        The program with transfers. The compute tasks keep their order.

    Raises:
        ProgramError: the program has tasks other than compute tasks, or an edge names what the program does not have,
            or is against the order of the sweeps.
        ScheduleError: `prefetch` is negative.
    """
    require_at_least(0, "prefetch", prefetch)
    placement = program.placement()
    for rank, tasks in enumerate(program.ranks):
        for task in tasks:
            if not task.kind.is_compute:
                raise ProgramError(
                    f"Transfers are added to a program of compute tasks, once. Received: task {task} on rank {rank}"
                )
    _check_edges(program, edges)
    where = _positions(program)
    ends = _ends(program)
    receives: list[dict[int, list[tuple[int, Task]]]]
    receives = [defaultdict(list) for _ in program.ranks]
    sends: list[dict[int, list[Task]]] = [defaultdict(list) for _ in program.ranks]
    for edge in edges:
        source, target = placement[edge.src_chunk], placement[edge.dst_chunk]
        if source == target:
            continue
        for microbatch in range(program.microbatches) if edge.per == "microbatch" else (None,):
            send = Task(Kind.SEND, edge.src_chunk, microbatch, edge=edge.index)
            sends[source][_made_by(program, where, edge, microbatch)].append(send)
            receive = Task(Kind.RECV, edge.dst_chunk, microbatch, edge=edge.index)
            position, meant_for = _opened_at(program, where, edge, microbatch, prefetch)
            if microbatch is not None and microbatch + edge.crosses < program.microbatches and ends:
                full = ends[source][_made_by(program, where, edge, microbatch + edge.crosses)]
                position = min(position, bisect_left(ends[target], full))
            receives[target][position].append((meant_for, receive))
    return Program(
        tuple(tuple(_merge(tasks, receives[rank], sends[rank])) for rank, tasks in enumerate(program.ranks)),
        program.microbatches,
        program.chunks,
        program.sweeps,
    )


def _ends(program: Program) -> list[list[float]]:
    """Returns when each rank is done with each of its tasks, if B takes two units of time and all else one.

    It returns nothing if the program cannot run. Only `check` says why.
    """
    result = replay(program, dependencies(program), lambda task: 2.0 if task.kind is Kind.B else 1.0, lambda _: 0.0)
    return [] if result.stuck else [[end for end in ends if end is not None] for ends in result.ends]


_Positions = Mapping[tuple[int, int, int], list[int]]


def _positions(program: Program) -> _Positions:
    """Returns the position in its rank's list of each (chunk, sweep, microbatch). I comes before W."""
    where: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for tasks in program.ranks:
        for position, task in enumerate(tasks):
            assert task.sweep is not None
            assert task.microbatch is not None
            where[task.chunk, task.sweep, task.microbatch].append(position)
    return where


def _made_by(program: Program, where: _Positions, edge: Edge, microbatch: int | None) -> int:
    """Returns the position of the task after which the edge's tensor exists; -1 is the step's start."""
    if edge.src_sweep is None:
        return -1
    key = edge.src_chunk, edge.src_sweep
    if microbatch is None:
        return max(where[(*key, each)][-1] for each in range(program.microbatches))
    # In a backward in two pieces, I makes what an earlier chunk needs, and W may make all else.
    pieces = where[(*key, microbatch)]
    return pieces[0] if edge.dst_sweep == edge.src_sweep else pieces[-1]


def _opened_at(
    program: Program, where: _Positions, edge: Edge, microbatch: int | None, prefetch: int
) -> tuple[int, int]:
    """Returns the position of the task before which the edge's RECV comes, and that of the task which it is for."""
    if microbatch is None:
        if edge.dst_sweep is None:
            tasks = program.ranks[program.placement()[edge.dst_chunk]]
            last = max(position for position, task in enumerate(tasks) if task.sweep == edge.src_sweep)
            return last, len(tasks)
        key = edge.dst_chunk, edge.dst_sweep
        meant_for = min(where[(*key, each)][0] for each in range(program.microbatches))
        return max(0, meant_for - prefetch), meant_for
    sweep = edge.src_sweep
    assert sweep is not None
    made_at = program.place_in_step(sweep, edge.src_chunk)
    own = where[edge.dst_chunk, sweep, microbatch][0]
    if program.place_in_step(sweep, edge.dst_chunk) < made_at:
        return own + 1, own + 1
    return max(0, own - prefetch), own


def _merge(
    tasks: Sequence[Task],
    receives: Mapping[int, list[tuple[int, Task]]],
    sends: Mapping[int, list[Task]],
) -> Iterator[Task]:
    yield from sends.get(-1, ())
    for position in range(len(tasks) + 1):
        for _, receive in sorted(receives.get(position, ()), key=lambda pair: pair[0]):
            yield receive
        if position < len(tasks):
            yield tasks[position]
        yield from sends.get(position, ())


def _check_edges(program: Program, edges: Sequence[Edge]) -> None:
    seen: set[int] = set()
    for edge in edges:
        if edge.index in seen:
            raise ProgramError(f"Edges have different indices. Received: {edge} twice")
        seen.add(edge.index)
        for chunk in (edge.src_chunk, edge.dst_chunk):
            if not 0 <= chunk < program.chunks:
                raise ProgramError(f"An edge joins two of the chunks 0 to {program.chunks - 1}. Received: {edge}")
        for sweep in (edge.src_sweep, edge.dst_sweep):
            if sweep is not None and not 0 <= sweep < program.sweeps:
                raise ProgramError(
                    f"An edge starts and ends in one of the sweeps 0 to {program.sweeps - 1}. Received: {edge}"
                )
        if edge.src_chunk == edge.dst_chunk:
            raise ProgramError(f"An edge joins two chunks; within one, no transfer is needed. Received: {edge}")
        if edge.src_sweep is None:
            if edge.per == "microbatch" or edge.dst_sweep is None:
                raise ProgramError(
                    f"What is there when the step starts is sent once per step, and to a reader. Received: {edge}"
                )
        elif edge.dst_sweep is not None and edge.per == "microbatch":
            made_at = program.place_in_step(edge.src_sweep, edge.src_chunk)
            if program.place_in_step(edge.dst_sweep, edge.dst_chunk) < made_at:
                raise ProgramError(
                    "An edge follows the order of the sweeps, up the chunks in sweep 0, down in "
                    f"sweep 1, up in sweep 2. Received: {edge}, whose reader runs before its maker"
                )

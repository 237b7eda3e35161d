"""Schedules: from (kind, stages, microbatches) to one ordered list of tasks per rank.

The order of tasks on a rank, for 3 stages and 4 microbatches (a column is one unit of time, B
takes one here, a dot is idle time; `draw` makes such pictures):

    simple (GPipe)                        interleaved (1F1B)
    rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Both take the same time; simple keeps the stash of every microbatch, interleaved on rank r at most
that of stages - r. To add a schedule, write one pure function and enter it in `SCHEDULES`.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from smp_tf.pipeline.errors import ProgramError, ScheduleError
from smp_tf.pipeline.task import Edge, Kind, Program, Task, goes_down

Order = Callable[[int, int, int], Iterator[Task]]
"""Yields the F, B, I and W tasks of a rank in order, from (stages, microbatches, rank)."""


def simple(stages: int, microbatches: int, rank: int) -> Iterator[Task]:
    """Yields all forwards, then all backwards.

    Source: GPipe, Huang et al. 2019.
    """
    for microbatch in range(microbatches):
        yield Task(Kind.F, rank, microbatch)
    for microbatch in range(microbatches):
        yield Task(Kind.B, rank, microbatch)


def interleaved(stages: int, microbatches: int, rank: int) -> Iterator[Task]:
    """Yields forwards until the first gradient is due, then a backward as soon as there is one.

    Source: PipeDream-flush, Narayanan et al. 2021; DAPPLE, Fan et al. 2021 ("1F1B").
    """
    ahead = min(stages - rank - 1, microbatches)
    for microbatch in range(ahead):
        yield Task(Kind.F, rank, microbatch)
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Task(Kind.F, rank, microbatch + ahead)
        yield Task(Kind.B, rank, microbatch)


SCHEDULES: Mapping[str, Order] = MappingProxyType({"simple": simple, "interleaved": interleaved})
"""Every schedule by the name a configuration calls it."""


def build(kind: str, stages: int, microbatches: int, *, backward: bool = True, sweeps: int = 2) -> Program:
    """Returns what every rank computes in one step, in order.

    Args:
        kind: a name in `SCHEDULES`.
        stages: how many ranks share the model, 1 or more.
        microbatches: how many microbatches a step runs, 1 or more.
        backward: False for a forward-only program, as evaluation needs it.
        sweeps: how often a microbatch crosses the stages; each sweep after the second (backward)
            is appended to the program as T tasks.

    Returns:
        A program of compute tasks; `add_transfers` puts the sends and receives in.

    Raises:
        ScheduleError: there is no such schedule, or it is not defined for these numbers.

    Example:
        >>> print(build("interleaved", stages=2, microbatches=3).text())
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    order = SCHEDULES.get(kind)
    if order is None:
        nearest = difflib.get_close_matches(str(kind), SCHEDULES, n=1, cutoff=0.4)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ScheduleError(f"A schedule is one of {', '.join(map(repr, SCHEDULES))}. Received: {kind!r}.{hint}")
    _require_at_least(1, "stages", stages)
    _require_at_least(1, "microbatches", microbatches)
    _require_at_least(2, "sweeps", sweeps)
    if not backward and sweeps > 2:
        raise ScheduleError(
            "Sweeps after the second come after backward, so a program without backward has none. "
            f"Received: backward=False, sweeps={sweeps}. Use sweeps=2 or backward=True"
        )
    ranks = [list(order(stages, microbatches, rank)) for rank in range(stages)]
    chunks = 1 + max(task.chunk for tasks in ranks for task in tasks)
    if not backward:
        ranks = [[task for task in tasks if task.kind is Kind.F] for tasks in ranks]
        sweeps = 1
    for sweep in range(2, sweeps):
        for tasks in ranks:
            own = sorted({task.chunk for task in tasks}, reverse=goes_down(sweep))
            tasks.extend(
                Task(Kind.T, chunk, microbatch, sweep=sweep) for microbatch in range(microbatches) for chunk in own
            )
    return Program(tuple(map(tuple, ranks)), microbatches, chunks, sweeps)


def _require_at_least(least: int, name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        is_number = isinstance(value, int | float) and math.isfinite(value)
        nearest = max(least, math.ceil(value)) if is_number else least
        raise ScheduleError(
            f"{name} is a whole number, {least} or more. Received: {value!r} (of type "
            f"{type(value).__name__}). The nearest legal value is {nearest}"
        )


def peak_stash(program: Program, freed_by: Kind = Kind.W) -> tuple[int, ...]:
    """Returns how many microbatches of activations each rank holds at most at once.

    A chunk keeps the activations of a microbatch from its F on, until its B is done or, where
    backward is in two pieces, until `freed_by`. Without backward nothing is kept.

    Args:
        program: the program of one step.
        freed_by: W, or I for segments that free nearly all of their stash at the first piece.

    Returns:
        One count per rank, in units of one chunk and one microbatch.

    Example:
        >>> peak_stash(build("interleaved", stages=4, microbatches=8))
        (4, 3, 2, 1)
    """
    peaks = []
    for tasks in program.ranks:
        live = peak = 0
        for task in tasks:
            if task.kind is Kind.F and program.sweeps > 1:
                live += 1
                peak = max(peak, live)
            elif task.kind is Kind.B or task.kind is freed_by:
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def in_flight(kind: str, stages: int, microbatches: int) -> tuple[int, ...]:
    """Returns `peak_stash` of the training program of a schedule: what a memory forecast needs.

    Args:
        kind: a name in `SCHEDULES`.
        stages: how many ranks share the model.
        microbatches: how many microbatches a step runs.

    Returns:
        One count per rank, in units of one chunk and one microbatch.

    Raises:
        ScheduleError: as `build`.

    Example:
        >>> in_flight("simple", stages=4, microbatches=8)
        (8, 8, 8, 8)
    """
    return peak_stash(build(kind, stages, microbatches))


def add_transfers(program: Program, edges: Sequence[Edge], *, prefetch: int = 1) -> Program:
    """Returns the program with a SEND and a RECV for every transfer edge and microbatch.

    A SEND stands straight after the task that makes the tensor. A RECV stands `prefetch` compute
    tasks before the receiving chunk's task of that sweep, so that the message travels while
    another task computes. Both only start a transfer; what waits for a message is its reader. For
    2 stages and 2 microbatches, edge 0 from F to F, edge 1 from B to B:

        rank 0      F0 S0.0 R1.0 F1 S0.1 R1.1 B0 B1
        rank 1 R0.0 F0 R0.1 B0 S1.0 F1 B1 S1.1

    R0.1 (edge 0, microbatch 1) is open while B0 computes, so that F1 need not wait for it. A rank
    holds at most prefetch + 1 tensors of an edge that are not read yet, however many microbatches
    there are.

    Where the receiving chunk does its task of the maker's sweep before the maker, as the chunks
    before the last one do when it sends its loss, the RECV stands straight behind that task. The
    reader comes a sweep later, and the tensor is part of the receiver's stash until then; a result
    of the step has no reader at all, and is kept to the end. So every receive is open when its
    tensor is made or soon after. A rank runs ahead of another by at most as many microbatches as
    there are chunks between them, so a sender that can hold one tensor of an edge per chunk that
    the edge crosses suffices: no number of microbatches makes ranks wait for each other because
    their buffers are full.

    A tensor sent once per step goes before its reader's first microbatch, or behind its maker's
    last one; as a result it is received at the end.

    Args:
        program: compute tasks only, as `build` returns it.
        edges: what has to move. Edges between two chunks of one rank need no transfer and get none.
        prefetch: how many compute tasks ahead of its reader a tensor is asked for, 0 or more.

    Returns:
        The program with transfers; the compute tasks keep their order.

    Raises:
        ProgramError: the program has other than compute tasks, or an edge names what the program
            does not have, or runs against the order of the sweeps.
        ScheduleError: prefetch is negative.
    """
    _require_at_least(0, "prefetch", prefetch)
    placement = program.placement()
    for rank, tasks in enumerate(program.ranks):
        for task in tasks:
            if not task.kind.is_compute:
                raise ProgramError(
                    f"Transfers are added to a program of compute tasks, once. Received: task {task} on rank {rank}"
                )
    _check_edges(program, edges)
    where = _positions(program)
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
            receives[target][position].append((meant_for, receive))
    return Program(
        tuple(tuple(_merge(tasks, receives[rank], sends[rank])) for rank, tasks in enumerate(program.ranks)),
        program.microbatches,
        program.chunks,
        program.sweeps,
    )


_Positions = Mapping[tuple[int, int, int], list[int]]


def _positions(program: Program) -> _Positions:
    """Where on its rank's list each (chunk, sweep, microbatch) is computed; I before W."""
    where: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for tasks in program.ranks:
        for position, task in enumerate(tasks):
            assert task.sweep is not None
            assert task.microbatch is not None
            where[task.chunk, task.sweep, task.microbatch].append(position)
    return where


def _made_by(program: Program, where: _Positions, edge: Edge, microbatch: int | None) -> int:
    """Position of the task behind which the edge's tensor is there; -1 is the step's start."""
    if edge.src_sweep is None:
        return -1
    key = edge.src_chunk, edge.src_sweep
    if microbatch is None:
        return max(where[(*key, each)][-1] for each in range(program.microbatches))
    # Of a backward in two pieces, I makes what a chunk before needs, W may make all else.
    pieces = where[(*key, microbatch)]
    return pieces[0] if edge.dst_sweep == edge.src_sweep else pieces[-1]


def _opened_at(
    program: Program, where: _Positions, edge: Edge, microbatch: int | None, prefetch: int
) -> tuple[int, int]:
    """Position of the task before which the edge's RECV stands, and of the one it is meant for."""
    if microbatch is None:
        if edge.dst_sweep is None:
            end = len(program.ranks[program.placement()[edge.dst_chunk]])
            return end, end
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

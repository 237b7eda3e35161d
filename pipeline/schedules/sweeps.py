"""Orders the microbatches of one sweep for every rank, whatever chunks it has.

Of the chunks that a microbatch has reached, a rank takes the one that is farthest on its way. So few microbatches are
under way at once. For 2 stages, 2 chunks per rank and 3 microbatches, a column being one unit of time:

    looped                              in a V
    rank 0  0.0 0.1 2.0 2.1 0.2 ... 2.2     0.0 0.1 0.2 3.0 ... 3.1 ... 3.2
    rank 1  ... 1.0 1.1 3.0 3.1 1.2 ... 3.2     ... 1.0 2.0 1.1 2.1 1.2 2.2 ...
"""

from __future__ import annotations

from collections.abc import Sequence

from smp_tf.pipeline.task import Kind, Program, Task, goes_down

Visit = tuple[int, int]
"""A chunk and a microbatch."""


def visits(placement: Sequence[int], microbatches: int, *, down: bool = False) -> list[list[Visit]]:
    """Returns the order in which each rank takes the microbatches of a sweep through its chunks.

    Args:
        placement: the rank of every chunk.
        microbatches: how many microbatches there are.
        down: whether the sweep goes from the last chunk to the first.

    Returns:
        Per rank a list of (chunk, microbatch).

    Example:
        >>> visits((0, 1, 1, 0), microbatches=2)
        [[(0, 0), (0, 1), (3, 0), (3, 1)], [(1, 0), (2, 0), (1, 1), (2, 1)]]
    """
    last = len(placement) - 1
    if down:
        mirrored = visits(placement[::-1], microbatches)
        return [[(last - chunk, microbatch) for chunk, microbatch in own] for own in mirrored]
    farthest_first: list[list[int]] = [[] for _ in range(1 + max(placement))]
    for chunk in range(last, -1, -1):
        farthest_first[placement[chunk]].append(chunk)
    taken = [0] * len(placement)
    orders: list[list[Visit]] = [[] for _ in farthest_first]
    while taken[last] < microbatches:
        reached = [microbatches, *taken]
        for rank, own in enumerate(farthest_first):
            ready = [chunk for chunk in own if taken[chunk] < reached[chunk]]
            if ready:
                orders[rank].append((ready[0], taken[ready[0]]))
                taken[ready[0]] += 1
    return orders


def forward_only(program: Program) -> Program:
    """Returns the program that runs only the forwards of another one, as evaluation needs it.

    Args:
        program: any program.

    Returns:
        A program of F tasks with the same chunks on the same ranks.

    Example:
        >>> from smp_tf.pipeline.programs.text import parse_program
        >>> forward_only(parse_program("0F0 0B0 0F1 0B1")).text()
        '0F0 0F1'
    """
    orders = visits(program.placement(), program.microbatches)
    ranks = tuple(tuple(Task(Kind.F, chunk, microbatch) for chunk, microbatch in own) for own in orders)
    return Program(ranks, program.microbatches, program.chunks, sweeps=1)


def with_sweeps(program: Program, sweeps: int) -> Program:
    """Returns the program with T tasks appended for every further sweep.

    Args:
        program: a program of compute tasks, with backward.
        sweeps: how many sweeps the result has.

    Returns:
        The program. It is the same one where no sweep is added.

    Example:
        >>> from smp_tf.pipeline.programs.text import parse_program
        >>> with_sweeps(parse_program("0F0 1F0 1B0 0B0"), 4).text()
        '0F0 1F0 1B0 0B0 0T2.0 1T2.0 1T3.0 0T3.0'
    """
    ranks = [list(tasks) for tasks in program.ranks]
    for sweep in range(program.sweeps, sweeps):
        for rank, own in enumerate(visits(program.placement(), program.microbatches, down=goes_down(sweep))):
            ranks[rank] += [Task(Kind.T, chunk, microbatch, sweep=sweep) for chunk, microbatch in own]
    return Program(tuple(map(tuple, ranks)), program.microbatches, program.chunks, max(program.sweeps, sweeps))

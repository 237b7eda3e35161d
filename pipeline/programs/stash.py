"""Counts the microbatches whose activations a program keeps, by chunk.

A chunk keeps the activations of a microbatch from its F until its B is done or, where backward is in two pieces, its W:

    rank 0    0F0  3F0  0F1  3I0  3W0  0I0  0W0
    chunk 0    1    1    2    2    2    2    1
    chunk 3    .    1    1    1    .    .    .
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from smp_tf.pipeline.programs.kinds import KINDS, StashChange
from smp_tf.pipeline.task import Kind, Program, Task


def peak_stash(program: Program, freed_by: Kind = Kind.W) -> tuple[int, ...]:
    """Returns the most microbatches of activations that each rank holds at once.

    A chunk keeps the activations of a microbatch from its F until its B is done or, where backward is in two pieces,
    until `freed_by`. Without backward nothing is kept.

    Args:
        program: the program of one step.
        freed_by: W, or I for segments that free nearly all of their stash at the first piece.

    Returns:
        One count per rank, in units of one chunk and one microbatch. With several chunks per rank, it is the largest
        sum over them at any moment.

    Example:
        >>> from smp_tf.pipeline.schedules.schedule import build
        >>> peak_stash(build("interleaved", stages=4, microbatches=8))
        (4, 3, 2, 1)
    """
    return tuple(
        max((sum(held.values()) for held in _moments(program, tasks, freed_by)), default=0) for tasks in program.ranks
    )


def stash_profile(program: Program, freed_by: Kind = Kind.W) -> tuple[tuple[Mapping[int, int], ...], ...]:
    """Returns what each rank holds of each of its chunks at the moments at which it may hold most.

    Chunks differ in size, so their bytes decide which moment is the fullest. A moment is left out if another one has no
    less of any chunk. What a rank needs is `max(sum(count * nbytes[chunk] for chunk, count in held.items()) for held in
    profile[rank])`.

    Args:
        program: the program of one step.
        freed_by: W, or I for segments that free nearly all of their stash at the first piece.

    Returns:
        For each rank and moment, a mapping from chunk to microbatches held, with all chunks of the rank. With one chunk
        per rank there is one moment. Without backward nothing is held.

    Example:
        >>> from smp_tf.pipeline.schedules.schedule import build
        >>> stash_profile(build("interleaved", stages=2, microbatches=4))
        (({0: 2},), ({1: 1},))
        >>> stash_profile(build("v_min", stages=2, microbatches=4))[1]
        ({1: 2, 2: 2},)
    """
    return tuple(tuple(_largest(list(_moments(program, tasks, freed_by)))) for tasks in program.ranks)


def _moments(program: Program, tasks: Sequence[Task], freed_by: Kind) -> Iterator[Mapping[int, int]]:
    """Yields what is held of each chunk after each F, and at the start. Only there can it be most."""
    held = {chunk: 0 for chunk in sorted({task.chunk for task in tasks if task.kind.is_compute})}
    yield dict(held)
    for task in tasks:
        stash = KINDS[task.kind].stash
        if stash is StashChange.BEGINS and program.sweeps > 1:
            held[task.chunk] += 1
            yield dict(held)
        elif stash is StashChange.ENDS or (stash is StashChange.MAY_END and task.kind is freed_by):
            held[task.chunk] -= 1


def _largest(moments: Sequence[Mapping[int, int]]) -> Iterator[Mapping[int, int]]:
    different = list({tuple(moment.values()): moment for moment in moments}.items())
    for counts, moment in different:
        others = (other for other, _ in different if other != counts)
        if not any(all(a <= b for a, b in zip(counts, other, strict=True)) for other in others):
            yield moment

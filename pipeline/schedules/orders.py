"""Orders of tasks given by formulas: GPipe, 1F1B, interleaved 1F1B and ZB-H1.

Each is a pure function from (stages, microbatches, chunks per rank) to the F, B, I and W tasks of every rank, in order.
In the steady state all orders but GPipe's run a forward and a backward in turn. They differ in how many forwards a rank
runs ahead, and in what fills its waiting time at the end. The middle one of 3 ranks, 4 microbatches:

    simple            F0 F1 F2 F3 B0 B1 B2 B3
    interleaved       F0 F1 B0 F2 B1 F3 B2 B3               stages - rank forwards, then in turn
    zb_h1             F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3   W comes `rank` microbatches after I
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from smp_tf.pipeline.task import Kind, Task

Ranks = list[list[Task]]
"""The tasks of rank 0, of rank 1, and so on."""

Order = Callable[[int, int, int], Ranks]
"""The F, B, I and W tasks of every rank in order, from (stages, microbatches, chunks per rank)."""


def simple(stages: int, microbatches: int, chunks_per_rank: int = 1) -> Ranks:
    """Returns all forwards, then all backwards.

    Args:
        stages: how many ranks share the model.
        microbatches: how many microbatches a step runs.
        chunks_per_rank: 1.

    Returns:
        The tasks of every rank. Each keeps the stash of every microbatch.

    Example:
        >>> print(*simple(2, 2)[1])
        1F0 1F1 1B0 1B1

    Source: GPipe, Huang et al. 2019 (arXiv 1811.06965), section 2.3.
    """
    every = range(microbatches)
    return [[Task(kind, rank, each) for kind in (Kind.F, Kind.B) for each in every] for rank in range(stages)]


def interleaved(stages: int, microbatches: int, chunks_per_rank: int = 1) -> Ranks:
    """Returns forwards until the first gradient is due, then a backward as soon as one is ready.

    Args:
        stages: how many ranks share the model.
        microbatches: how many microbatches a step runs.
        chunks_per_rank: 1.

    Returns:
        The tasks of every rank. Rank r keeps the stash of min(stages - r, microbatches).

    Example:
        >>> print(*interleaved(2, 3)[0])
        0F0 0F1 0B0 0F2 0B1 0B2

    Source: PipeDream-flush, Narayanan et al. 2021; DAPPLE, Fan et al. 2021 ("1F1B").
    """
    return [list(_one_forward_one_backward(stages, microbatches, rank)) for rank in range(stages)]


def _one_forward_one_backward(stages: int, microbatches: int, rank: int) -> Iterator[Task]:
    ahead = min(stages - rank - 1, microbatches)
    for microbatch in range(ahead):
        yield Task(Kind.F, rank, microbatch)
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Task(Kind.F, rank, microbatch + ahead)
        yield Task(Kind.B, rank, microbatch)


def zb_h1(stages: int, microbatches: int, chunks_per_rank: int = 1) -> Ranks:
    """Returns 1F1B with backward in two pieces. The second piece fills the waiting time at the end.

    Rank r runs the W of a microbatch r microbatches after its I. So the I that the rank before waits for comes first.
    When no forward is left, a W stands wherever 1F1B would wait.

    Args:
        stages: how many ranks share the model.
        microbatches: how many microbatches a step runs.
        chunks_per_rank: 1.

    Returns:
        The tasks of every rank. Rank r keeps min(stages, microbatches) stashes until W is done. All but min(stages - r,
        microbatches) of them have had their I.

    Example:
        >>> print(*zb_h1(2, 2)[1])
        1F0 1I0 1F1 1I1 1W0 1W1

    Source: Zero Bubble Pipeline Parallelism, Qi et al. 2023 (arXiv 2401.10241), section 2.1
        (ZB-H1).
    """
    return [list(_weights_later(stages, microbatches, rank)) for rank in range(stages)]


def _weights_later(stages: int, microbatches: int, rank: int) -> Iterator[Task]:
    later = min(rank, microbatches)
    for task in _one_forward_one_backward(stages, microbatches, rank):
        if task.kind is Kind.F:
            yield task
            continue
        assert task.microbatch is not None
        yield Task(Kind.I, rank, task.microbatch)
        if task.microbatch >= later:
            yield Task(Kind.W, rank, task.microbatch - later)
    for microbatch in range(microbatches - later, microbatches):
        yield Task(Kind.W, rank, microbatch)


def interleaved_1f1b(stages: int, microbatches: int, chunks_per_rank: int = 2) -> Ranks:
    """Returns 1F1B over several chunks per rank, in which microbatches pass in groups.

    A rank takes a group of microbatches through its first chunk, then through its second, and so on. A group has as
    many microbatches as there are stages. So its first microbatch has passed the other ranks when its last is done
    here. For 2 stages and 4 microbatches, a column as long as F:

        rank 0  0F0 0F1 2F0 2F1 0F2 ... 2B0==== 0F3 2B1==== 2F2 0B0==== 2F3 0B1==== ...
        rank 1  ... 1F0 1F1 3F0 3B0==== 3F1 3B1==== 1F2 1B0==== 1F3 1B1==== 3F2 3B2==== ...

    Where the number of stages does not divide that of microbatches, Megatron-LM refuses. Here groups are larger then,
    and as even as possible: 4 stages take 11 microbatches as 6 and 5. Fewer microbatches than stages are one group.

    Args:
        stages: how many ranks share the model.
        microbatches: how many microbatches a step runs.
        chunks_per_rank: how many chunks each rank has, 2 or more.

    Returns:
        The tasks of every rank. Chunk c is on rank c % stages. With g the size of the largest group, rank r keeps min(2
        (stages - 1 - r) + (chunks_per_rank - 1) g + 1, microbatches chunks_per_rank) stashes of a chunk.

    Example:
        >>> print(*interleaved_1f1b(2, 2)[0])
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, and Megatron-LM's
        `forward_backward_pipelining_with_interleaving`, from which the forwards ahead are.
    """
    groups = _groups(stages, microbatches)
    own = range(chunks_per_rank)
    forwards = [(turn, each) for group in groups for turn in own for each in group]
    backwards = [(turn, each) for group in groups for turn in reversed(own) for each in group]
    largest = max(len(group) for group in groups)
    ranks: Ranks = []
    for rank in range(stages):
        first = [Task(Kind.F, turn * stages + rank, each) for turn, each in forwards]
        second = [Task(Kind.B, turn * stages + rank, each) for turn, each in backwards]
        ahead = min(2 * (stages - 1 - rank) + (chunks_per_rank - 1) * largest, len(first))
        tasks = first[:ahead]
        for position, backward in enumerate(second):
            tasks += [*first[ahead + position : ahead + position + 1], backward]
        ranks.append(tasks)
    return ranks


def _groups(stages: int, microbatches: int) -> list[range]:
    """Returns the microbatches in nearly equal groups, of as many as there are stages or a few more."""
    count = max(1, microbatches // stages)
    bounds = [microbatches * at // count for at in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]

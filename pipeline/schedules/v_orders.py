"""Orders for two chunks per rank in a V, made from a building block: ZB-V, V-half and V-min.

A building block says in which slots of time one microbatch passes the ranks. The next microbatch takes the same way six
slots later. A rank has six tasks per microbatch, F, I and W of two chunks. So the blocks fill its time without a gap as
long as no two tasks want the same slot modulo six. The block of V-min for 4 ranks (chunks 0 to 3 go down, 4 to 7 come
up, I the same way back):

    slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    rank 0  F0 .. .. .. .. .. .. F7 I7 .. .. .. .. .. .. I0
    rank 1  .. F1 .. .. .. .. F6 .. .. I6 .. .. .. .. I1 ..
    rank 2  .. .. F2 .. .. F5 .. .. .. .. I5 .. .. I2 .. ..
    rank 3  .. .. .. F3 F4 .. .. .. .. .. .. I4 I3 .. .. ..

The length of a block decides how much is kept. The time from the F to the I of one chunk and that of the other, added,
are the same on every rank, and each six slots of this sum are one more stash. So a short block keeps little, and a long
one waits less.

The block gives only the order of F and I on each rank. Then the step is simulated with tasks that all take one slot. A
rank runs its next F or I when it can, and else a W that is left. An F that the limit of stashes forbids waits for a W.
This removes the empty slots at both ends, where blocks of neighbours are missing.

Source: Pipeline Parallelism with Controllable Memory, Qi et al. 2024 (arXiv 2405.15362), sections
3 and 4 (building blocks, V-min, V-half, V-ZB); Zero Bubble Pipeline Parallelism, Qi et al. 2023
(arXiv 2401.10241), section 6 (ZB-V).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from smp_tf.pipeline.schedules.orders import Ranks
from smp_tf.pipeline.schedules.placements import in_a_v
from smp_tf.pipeline.task import Kind, Task

_PERIOD = 6


def zb_v(stages: int, microbatches: int, chunks_per_rank: int = 2) -> Ranks:
    """Returns the order that hardly waits, and that keeps on every rank what 1F1B keeps on the first.

    Args:
        stages: how many ranks share the model.
        microbatches: how many microbatches a step runs.
        chunks_per_rank: 2.

    Returns:
        The tasks of every rank, which keeps 2 min(stages, microbatches) stashes of a chunk.

    Example:
        >>> print(*zb_v(2, 1)[1])
        1F0 2F0 2I0 1I0 2W0 1W0

    Source: Zero Bubble, section 6; Controllable Memory, section 4 (V-ZB).
    """
    return _filled(stages, microbatches, _fi_orders(stages, microbatches, (3, 3, 3, 3)), 2 * stages)


def v_half(stages: int, microbatches: int, chunks_per_rank: int = 2) -> Ranks:
    """Returns the order with half the stash and half the bubble of 1F1B.

    Args:
        stages: how many ranks share the model.
        microbatches: how many microbatches a step runs.
        chunks_per_rank: 2.

    Returns:
        The tasks of every rank, which keeps at most 2 ((stages + 2) // 2) stashes of a chunk.

    Example:
        >>> print(*v_half(2, 1)[0])
        0F0 3F0 3I0 3W0 0I0 0W0

    Source: Controllable Memory, section 4 (V-Half).
    """
    # With an even number of stages the limit has room for a longer block, which waits less.
    turns = (2, 1, 1) if stages % 2 == 0 else (0, 0, 0)
    orders = _fi_orders(stages, microbatches, (2, 1, 2, 1), turns)
    return _filled(stages, microbatches, orders, 2 * ((stages + 2) // 2))


def v_min(stages: int, microbatches: int, chunks_per_rank: int = 2) -> Ranks:
    """Returns the order with a third of the stash of 1F1B, and two thirds of its bubble.

    Args:
        stages: how many ranks share the model.
        microbatches: how many microbatches a step runs.
        chunks_per_rank: 2.

    Returns:
        The tasks of every rank, which keeps at most 2 ((stages + 4) // 3) stashes of a chunk.

    Example:
        >>> print(*v_min(2, 2)[1])
        1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1

    Source: Controllable Memory, section 4 (V-Min).
    """
    return _filled(stages, microbatches, _fi_orders(stages, microbatches, (1, 1, 1, 1)), 2 * ((stages + 4) // 3))


def _block(stages: int, steps: Sequence[int], turns: Sequence[int]) -> Mapping[tuple[Kind, int], int]:
    """Returns the slots in which a microbatch passes the ranks.

    Args:
        stages: how many ranks there are.
        steps: slots from a rank to the next on each of the four legs: F down the V and up again, I down and up.
        turns: slots to wait between two legs, in addition.

    Returns:
        A slot for every (kind, chunk). Where a slot is taken already, modulo six, the next free one is used.
    """
    placement = in_a_v(stages)
    chunks = range(2 * stages)
    way = [(Kind.F, chunk) for chunk in chunks] + [(Kind.I, chunk) for chunk in reversed(chunks)]
    taken: list[set[int]] = [set() for _ in range(stages)]
    slots = {}
    slot = -1
    for position, (kind, chunk) in enumerate(way):
        leg, begun = divmod(position, stages)
        slot += steps[leg] if begun else 1 + (turns[leg - 1] if leg else 0)
        rank = placement[chunk]
        while slot % _PERIOD in taken[rank]:
            slot += 1
        taken[rank].add(slot % _PERIOD)
        slots[kind, chunk] = slot
    return slots


def _fi_orders(stages: int, microbatches: int, steps: Sequence[int], turns: Sequence[int] = (0, 0, 0)) -> Ranks:
    """Returns the F and I tasks of every rank, by the slots of their blocks."""
    placement = in_a_v(stages)
    timed: list[list[tuple[int, Task]]] = [[] for _ in range(stages)]
    for (kind, chunk), slot in _block(stages, steps, turns).items():
        for microbatch in range(microbatches):
            timed[placement[chunk]].append((slot + _PERIOD * microbatch, Task(kind, chunk, microbatch)))
    return [[task for _, task in sorted(own, key=lambda pair: pair[0])] for own in timed]


def _filled(stages: int, microbatches: int, orders: Ranks, limit: int) -> Ranks:
    """Puts the W tasks where a rank would wait.

    Args:
        stages: how many ranks there are.
        microbatches: how many microbatches a step runs.
        orders: the F and I tasks of every rank.
        limit: how many stashes of a chunk a rank keeps at most, from F to W.

    Returns:
        The tasks of every rank.
    """
    left = [deque(tasks) for tasks in orders]
    weights: list[deque[Task]] = [deque() for _ in orders]
    kept = [0] * stages
    ranks: Ranks = [[] for _ in orders]
    done: set[tuple[Kind, int, int | None]] = set()
    while any(left) or any(weights):
        # What all ranks do in one slot. Others can use the results from the next slot on.
        begun = []
        for rank in range(stages):
            task = left[rank][0] if left[rank] else None
            may = task is not None and (task.kind is not Kind.F or kept[rank] < limit)
            if task is not None and may and all(need in done for need in _needs(task, 2 * stages)):
                left[rank].popleft()
                if task.kind is Kind.F:
                    kept[rank] += 1
                else:
                    weights[rank].append(Task(Kind.W, task.chunk, task.microbatch))
            elif weights[rank]:
                task = weights[rank].popleft()
                kept[rank] -= 1
            else:
                continue
            ranks[rank].append(task)
            begun.append((task.kind, task.chunk, task.microbatch))
        assert begun, f"ranks wait for each other: {stages} stages, {microbatches} microbatches, {limit} stashes"
        done.update(begun)
    return ranks


def _needs(task: Task, chunks: int) -> list[tuple[Kind, int, int | None]]:
    chunk, microbatch = task.chunk, task.microbatch
    if task.kind is Kind.F:
        return [(Kind.F, chunk - 1, microbatch)] if chunk else []
    own = (Kind.F, chunk, microbatch)
    return [own] if chunk == chunks - 1 else [own, (Kind.I, chunk + 1, microbatch)]

"""Orders of tasks for chunks on any ranks, such as a rank that has both ends of a model.

    placement (0, 1, 0)     rank 0  0F0 0F1 2F0 2B0 ...     a microbatch visits rank 0 twice on its way up,
                            rank 1  1F0 1F1 1B0 ...         and twice on its way down

Where every rank has one chunk, these are GPipe and 1F1B of `orders`. For other placements there is no formula. So the
ranks are simulated: each runs, of the tasks that are ready, the one that frees most.
"""

from __future__ import annotations

from collections.abc import Sequence

from smp_tf.pipeline.schedules.orders import Ranks
from smp_tf.pipeline.schedules.sweeps import visits
from smp_tf.pipeline.task import Kind, Task

#: Units of time that a task takes while the order is made.
_LENGTH = {Kind.F: 1, Kind.B: 2}


def simple_over(placement: Sequence[int], microbatches: int) -> Ranks:
    """Returns all forwards, then all backwards.

    Args:
        placement: the rank of every chunk.
        microbatches: how many microbatches a step runs.

    Returns:
        The tasks of every rank.

    Example:
        >>> print(*simple_over((0, 1, 0), 1)[0])
        0F0 2F0 2B0 0B0
    """
    forwards, backwards = visits(placement, microbatches), visits(placement, microbatches, down=True)
    return [
        [*(Task(Kind.F, *visit) for visit in up), *(Task(Kind.B, *visit) for visit in down)]
        for up, down in zip(forwards, backwards, strict=True)
    ]


def interleaved_over(placement: Sequence[int], microbatches: int) -> Ranks:
    """Returns an order in which each rank runs a backward as soon as one is ready, and few forwards ahead.

    Chunk c of n keeps the stash of at most n - c microbatches, as in 1F1B. So many fill the way from the chunk to the
    end of the model and back.

    Args:
        placement: the rank of every chunk.
        microbatches: how many microbatches a step runs.

    Returns:
        The tasks of every rank.

    Example:
        >>> print(*interleaved_over((0, 1, 0), 2)[1])
        1F0 1F1 1B0 1B1
    """
    return _Play(placement, microbatches).run()


class _Play:
    """Simulates the ranks in units of time."""

    def __init__(self, placement: Sequence[int], microbatches: int) -> None:
        self.placement = placement
        self.microbatches = microbatches
        self.last = len(placement) - 1
        # How many microbatches each chunk has begun and done, forward and backward. They come in order.
        self.begun = {kind: [0] * len(placement) for kind in _LENGTH}
        self.done = {kind: [0] * len(placement) for kind in _LENGTH}

    def run(self) -> Ranks:
        ranks: Ranks = [[] for _ in range(1 + max(self.placement))]
        own = [[c for c in range(self.last, -1, -1) if self.placement[c] == rank] for rank in range(len(ranks))]
        until: list[int | None] = [None] * len(ranks)
        now = 0
        while self.done[Kind.B][0] < self.microbatches:
            for rank, tasks in enumerate(ranks):
                if until[rank] == now:
                    self.done[tasks[-1].kind][tasks[-1].chunk] += 1
                    until[rank] = None
            for rank, tasks in enumerate(ranks):
                task = self._next(own[rank]) if until[rank] is None else None
                if task is not None:
                    self.begun[task.kind][task.chunk] += 1
                    tasks.append(task)
                    until[rank] = now + _LENGTH[task.kind]
            now += 1
        return ranks

    def _next(self, own: Sequence[int]) -> Task | None:
        """Returns what a free rank runs: the oldest backward, else the forward that is farthest on its way."""
        forward, backward = self.begun[Kind.F], self.begun[Kind.B]
        due = [(backward[c], c) for c in own if backward[c] < self._reached(Kind.B, c)]
        if due:
            microbatch, chunk = min(due)
            return Task(Kind.B, chunk, microbatch)
        for chunk in own:
            in_flight = forward[chunk] - backward[chunk]
            if forward[chunk] < self._reached(Kind.F, chunk) and in_flight < self.last + 1 - chunk:
                return Task(Kind.F, chunk, forward[chunk])
        return None

    def _reached(self, kind: Kind, chunk: int) -> int:
        """Returns how many microbatches have come to a chunk."""
        if kind is Kind.F:
            return self.done[kind][chunk - 1] if chunk else self.microbatches
        return self.done[kind][chunk + 1] if chunk < self.last else self.done[Kind.F][chunk]

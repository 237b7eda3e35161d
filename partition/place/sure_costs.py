"""What runs of units surely cost where stages have several runs: added up, it is never more than a stage has.

    units     u0 u1 u2 u3 u4 u5 u6 u7        a tensor from u1 to u6: stage 0 makes and reads it, and receives nothing
    stages    [──0──] [──1──] [──0──]        a tensor from u1 to u3: stage 1 receives it, whatever else it has

Costs of runs count what a run receives from any other one. What another run of the same stage may make, or receive as
well, is left out here. It may do so if its units can be there: between two runs of a stage there is a unit for each
chunk at least. Likewise a shared weight is stored once, and whoever owns it has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from smp_tf.partition.place.placement import Chain, Chunks
from smp_tf.partition.place.run_costs import Array, RunCosts
from smp_tf.partition.place.solve_chain import earliest_starts


@dataclass(frozen=True)
class Run:
    """Chunks that follow one another on a stage.

    Args:
        stage: the stage.
        first, last: the first and the last chunk.
        before, after: how many chunks lie between it and the stage's run before and after it; None where there is none.
        begins: the first chunk of the stage.
    """

    stage: int
    first: int
    last: int
    before: int | None
    after: int | None
    begins: int


def runs_of(placement: Sequence[int]) -> list[Run]:
    """Returns the runs of chunks.

    Args:
        placement: the stage of every chunk.

    Example:
        >>> [(run.first, run.last, run.before, run.after, run.begins) for run in runs_of((0, 1, 1, 0))]
        [(0, 0, None, 2, 0), (1, 2, None, None, 1), (3, 3, 2, None, 0)]
    """
    found: list[tuple[int, int, int]] = []
    for chunk, stage in enumerate(placement):
        if found and found[-1][0] == stage:
            found[-1] = stage, found[-1][1], chunk
        else:
            found.append((stage, chunk, chunk))
    return [
        Run(
            *(stage, first, last),
            min((first - other - 1 for at, _, other in found if at == stage and other < first), default=None),
            min((other - last - 1 for at, other, _ in found if at == stage and other > last), default=None),
            min(other for at, other, _ in found if at == stage),
        )
        for stage, first, last in found
    ]


class SureCosts:
    """What runs surely cost.

    Args:
        chain: the units with their costs.
        chunks: where the chunks are, and what they keep.
        microbatches: per step.

    Attributes:
        runs: the runs, in order.
        sent: for each run the bytes per step that it receives, from each begin to each end; infinite where it cannot
            be.
        times, weights: the seconds of all units before each one, and the bytes of their weights.
        stash: bytes of one microbatch, from each begin to each end.
        owned: bytes that the owners of shared weights have besides.
        passes: bytes per step that pass each place for a cut.
    """

    def __init__(self, chain: Chain, chunks: Chunks, microbatches: int) -> None:
        self.count = count = len(chain.names)
        self.runs = runs_of(chunks.placement)
        starts, ends = earliest_starts(chain, chunks.placement), np.arange(count + 1)
        tables: dict[tuple[int | None, int | None, int], Array] = {}
        self.sent: list[Array] = []
        for run in self.runs:
            kind = run.before, run.after, run.begins
            if kind not in tables:
                tables[kind] = _received(chain, microbatches, *kind)
            length, chunks_after = run.last - run.first + 1, len(chunks.placement) - 1 - run.last
            first = np.min([starts[chunk] for chunk in range(run.first, run.last + 1)], axis=0)
            legal = (ends[:, None] >= first) & (ends[:, None] + length <= ends)
            legal &= (ends[:, None] >= run.first) & (ends <= count - chunks_after)
            if run.first == 0:
                legal &= ends[:, None] == 0
            if not chunks_after:
                legal &= ends == count
            self.sent.append(np.where(legal, tables[kind], np.inf))
        self.times = np.concatenate([[0.0], np.cumsum(np.asarray(chain.times, np.float64))])
        alone = np.zeros(count)
        for weight in chain.weights:
            alone[weight.users[0]] += weight.stored if len(weight.users) == 1 else weight.copied
        self.weights = np.concatenate([[0.0], np.cumsum(alone)])
        table = RunCosts.of(chain, frozenset(), microbatches)
        self.stash = table.stash
        self.passes = table.sent[0, 1:-1] + table.sent[1:-1, count]
        self.owned = sum(weight.stored - weight.copied for weight in chain.weights if len(weight.users) > 1)


def _received(chain: Chain, microbatches: int, before: int | None, after: int | None, begins: int) -> Array:
    """Returns the bytes per step that runs receive and no other run of their stage makes or counts, for sure.

    Where several runs of a stage may read a tensor, the first of them counts it, and of a shared weight the last one.

    Args:
        chain: the units.
        microbatches: per step.
        before: how many units at least lie between the run and the one before it of its stage; None where none is.
        after: the same of the one after it.
        begins: how many units at least lie before the first run of the stage.
    """
    count = len(chain.names)
    joins: list[list[tuple[int, int, float]]] = [[] for _ in range(count)]

    def latest(units: Iterable[int]) -> int:
        """Returns the last begin of a run before which the stage has no run with any of these units."""
        possible = [unit for unit in units if unit >= begins]
        return count if before is None or not possible else min(possible) + before

    for flow in chain.flows:
        producer, nbytes = flow.producer, flow.nbytes * microbatches
        last = latest((producer, *flow.consumers))
        # A run that ends before may have another one of its stage after it, with what makes the tensor.
        soonest = 0 if after is None else producer - after
        reached = 0
        for unit in (reader for reader in flow.consumers if reader < producer):
            joins[max(unit, soonest)].append((reached, min(unit, last) + 1, nbytes))
            reached = unit + 1
        if reached:
            joins[producer].append((0, min(reached, last + 1), -nbytes))
        reached = producer + 1
        for unit in (reader for reader in flow.consumers if reader > producer):
            joins[unit].append((reached, min(unit, last) + 1, nbytes))
            reached = unit + 1
    for weight in chain.weights:
        # All stages that use it, but that of its first user, receive its value, or its gradient.
        first, *readers = weight.users
        last = latest((first,))
        reached = first + 1
        for unit in readers:
            joins[max(unit, 0 if after is None else readers[-1] - after)].append(
                (reached, min(unit, last) + 1, weight.crossing)
            )
            reached = unit + 1
    table, column = np.zeros((count + 1, count + 1), order="F"), np.zeros(count + 1)
    for end, changes in enumerate(joins, 1):
        for low, high, nbytes in changes:
            if low < high:
                column[low:high] += nbytes
        table[:end, end] = column[:end]
    return table

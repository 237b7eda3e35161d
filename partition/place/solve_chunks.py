"""Cuts a chain of units into chunks, where a stage has several.

    units    u0 u1 u2 u3 u4 u5 u6 u7
    chunks   [─0─] [─1─] [─2─] [─3─]        placement (0, 1, 1, 0): stage 0 has u0 u1 u6 u7, stage 1 the others
             cuts move, alone and in pairs, as long as the fullest stage, or the step, gains

The cost of a stage is no maximum over its runs, but the dynamic program of `solve_chain` weighs run against run. So it
gives only the first cuts, and a local search goes on from these. Where there are few cuts, all are tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations, pairwise, product, zip_longest
from math import comb, inf

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.place.placement import Chain, Chunks, Placement, Ranks, costed
from smp_tf.partition.place.solve_chain import chunks_of_cuts, owner_choices, solve_chain

#: The most rounds in which every cut is moved. A few are enough where the start is good.
_ROUNDS = 12
#: Up to this number of cuts times owners of shared weights, all are tried.
MOST_CUTS = 2_000
#: By how many units two neighbouring cuts are moved together.
_BOTH = (-2, -1, 1, 2)
#: How many cuts are tried from all starts together, the same on every machine. Some hundred units take a second.
LOOKS = 3_000
#: The parts of a rank's limit that each of its chunks may have in the first cuts.
_SHARES = (1.0, 1.5, 2.0)

_Order = tuple[float, float, float]


def solve_chunks(
    chain: Chain,
    chunks: Chunks,
    *,
    objective: str = "memory",
    microbatches: int = 1,
    ranks: Ranks | None = None,
    looks: int = LOOKS,
) -> Placement:
    """Cuts a chain into chunks, none empty.

    Args:
        chain: the units in topological order, their costs, and the stages and chunks that are given.
        chunks: the stage of each chunk, and what stages keep.
        objective: "speed": the seconds of a step; "memory": the bytes of the fullest stage.
        microbatches: per step.
        ranks: how these differ, and what they may need; None where they are alike and may need anything.
        looks: how many cuts are tried beyond the first ones, where there are too many for all.

    Returns:
        The placement.

    Raises:
        PlacementError: there are fewer units than chunks, or none of the cuts agrees with what is given.
        MemoryLimitError: no cut was found that keeps within what ranks may need.

    Example:
        >>> chunks = Chunks((0, 1, 0), (({0: 1, 2: 1},), ({1: 1},)))
        >>> solve_chunks(Chain(("a", "b", "c"), (1.0, 2.0, 1.0)), chunks, objective="speed").times
        (2.0, 2.0)
    """
    ranks = ranks or Ranks.alike(chunks.stages)
    if len(chain.names) < len(chunks.placement):
        raise PlacementError(
            f"The model has {len(chain.names)} units that can be put in different chunks, and the schedule needs one "
            f"in each of its {len(chunks.placement)} chunks on {chunks.stages} partitions. Use fewer partitions, fewer "
            f"chunks_per_rank or another pipeline, or build the model of more layers."
        )
    search = _Search(chain, chunks, objective, microbatches, ranks)
    starts = list(dict(_starts(chain, chunks, objective, microbatches, ranks)).items())
    some = (search.improved(start, looks // len(starts)) for start in starts)
    found = search.all_cuts() if looks_at_all(chain, chunks) else some
    (over, _, _), best = min(found, key=_first)
    if over > 0:
        limits = [inf if most is None else most for most in ranks.memory]
        worst = max(range(chunks.stages), key=lambda stage: best.memory[stage] - limits[stage])
        raise MemoryLimitError(
            f"No cut into {len(chunks.placement)} chunks on {chunks.stages} partitions fits in memory_limit. Stage "
            f"{worst} needs {best.memory[worst] / 2**30:.2f} GiB, the limit is {limits[worst] / 2**30:.2f} GiB."
        )
    return best


def looks_at_all(chain: Chain, chunks: Chunks) -> bool:
    """Returns whether there are so few cuts that all of them are tried.

    Args:
        chain: the units.
        chunks: where they may be.
    """
    cuts = comb(len(chain.names) - 1, len(chunks.placement) - 1)
    return cuts * len(owner_choices(chain.weights)) <= MOST_CUTS


def all_placements(
    chain: Chain, chunks: Chunks, objective: str, microbatches: int, ranks: Ranks
) -> Iterator[Placement]:
    """Yields every cut that agrees with what is given and keeps within what ranks may need.

    Args:
        chain: the units.
        chunks: where they may be.
        objective: "speed" or "memory".
        microbatches: per step.
        ranks: how these differ, and what they may need.
    """
    for (over, _, _), found in _Search(chain, chunks, objective, microbatches, ranks).all_cuts():
        if over <= 0:
            yield found


def _first(pair: tuple[_Order, Placement]) -> _Order:
    return pair[0]


def _starts(
    chain: Chain, chunks: Chunks, objective: str, microbatches: int, ranks: Ranks
) -> Iterator[tuple[tuple[int, ...], dict[int, int]]]:
    """Returns the cuts and owners that would be best if each run had a rank for itself, with equal memory."""
    several = [chunks.placement.count(stage) for stage in chunks.placement]
    speed = tuple(ranks.speed[stage] for stage in chunks.placement)
    link = tuple(ranks.link[stage] for stage in chunks.placement)
    limits: list[tuple[float | None, ...]] = [(None,) * len(several)]
    if any(limit is not None for limit in ranks.memory):
        for share in _SHARES:
            of_stage = [ranks.memory[stage] for stage in chunks.placement]
            parts = zip(of_stage, several, strict=True)
            limits.append(tuple(None if most is None else most * min(1.0, share / count) for most, count in parts))
    found = False
    for memory in limits:
        for balanced in dict.fromkeys((objective, "speed", "memory")):
            try:
                cut = solve_chain(
                    chain,
                    len(several),
                    objective=balanced,
                    microbatches=microbatches,
                    in_flight=chunks.most_of_each,
                    ranks=Ranks(speed, link, memory),
                    placement=chunks.placement,
                )
            except MemoryLimitError:
                continue
            except PlacementError as error:
                if any(stage is not None for stage in chain.manual):
                    raise PlacementError(
                        f"No cut into {len(several)} chunks, on partitions {chunks.placement}, agrees with the manual "
                        f"placements: each chunk needs a layer, and data passes them in this order."
                    ) from error
                raise
            found = True
            yield cut.cuts, cut.owners
    assert found, "without limits there is a cut, or solve_chain has said why there is none"


class _Search:
    """Moves cuts as long as this helps."""

    def __init__(self, chain: Chain, chunks: Chunks, objective: str, microbatches: int, ranks: Ranks) -> None:
        self._chain = chain
        self._chunks = chunks
        self._objective = objective
        self._microbatches = microbatches
        self._ranks = ranks
        self._given = [
            (unit, stage, pin)
            for unit, (stage, pin) in enumerate(zip_longest(chain.manual, chain.pinned, fillvalue=None))
            if (stage, pin) != (None, None)
        ]
        #: Sets of shared weights that their last user has instead of their first.
        self.owner_choices = owner_choices(chain.weights)

    def all_cuts(self) -> Iterator[tuple[_Order, Placement]]:
        """Yields every cut that agrees with what is given, and how good it is."""
        for cuts in combinations(range(1, len(self._chain.names)), len(self._chunks.placement) - 1):
            if self._agrees(cuts):
                for late in self.owner_choices:
                    yield self._costed(cuts, late)

    def improved(self, start: tuple[tuple[int, ...], dict[int, int]], looks: int) -> tuple[_Order, Placement]:
        """Returns the best cuts that single moves lead to within a number of tries, and how good they are."""
        cuts, owners = start
        chunk_of = chunks_of_cuts(cuts, len(self._chain.names))
        late = frozenset(w.variable for w in self._chain.weights if owners[w.variable] != chunk_of[w.users[0]])
        order, found = self._costed(cuts, late)
        for _ in range(_ROUNDS):
            before = order
            for move in range(self._kinds_of_moves(cuts)):
                for moved in self._moves(cuts, move):
                    if not self._agrees(moved):
                        continue
                    if looks <= 0:
                        return order, found
                    looks -= 1
                    other, placement = self._costed(moved, late)
                    if other < order:
                        order, found, cuts = other, placement, moved
            for choice in self.owner_choices:
                other, placement = self._costed(cuts, choice)
                if other < order:
                    order, found, late = other, placement, choice
            if order == before:
                break
        return order, found

    def _kinds_of_moves(self, cuts: Sequence[int]) -> int:
        """Returns single cuts, and pairs of neighbours."""
        return 2 * len(cuts) - 1

    def _moves(self, cuts: tuple[int, ...], move: int) -> Iterator[tuple[int, ...]]:
        """Yields the cuts with one of them moved anywhere, or two of them a little."""
        if move < len(cuts):
            step = 1
            while step < len(self._chain.names):
                for by in (-step, step):
                    yield (*cuts[:move], cuts[move] + by, *cuts[move + 1 :])
                step *= 2
            return
        first = move - len(cuts)
        for one, other in product(_BOTH, _BOTH):
            yield (*cuts[:first], cuts[first] + one, cuts[first + 1] + other, *cuts[first + 2 :])

    def _agrees(self, cuts: Sequence[int]) -> bool:
        """Returns whether every chunk has a unit, and every given unit is where it must be."""
        bounds = (0, *cuts, len(self._chain.names))
        if any(later <= cut for cut, later in pairwise(bounds)):
            return False
        for unit, stage, pin in self._given:
            chunk = bisect_right(cuts, unit)
            if stage not in (None, self._chunks.placement[chunk]) or pin not in (None, chunk):
                return False
        return True

    def _costed(self, cuts: Sequence[int], late: Collection[int]) -> tuple[_Order, Placement]:
        """Returns the bytes too many for a rank, the cost that is balanced and the other cost; and the placement."""
        chunk_of = chunks_of_cuts(cuts, len(self._chain.names))
        owners = {w.variable: chunk_of[w.users[-1 if w.variable in late else 0]] for w in self._chain.weights}
        found = costed(self._chain, chunk_of, owners, self._microbatches, self._chunks, self._ranks)
        limits = zip(found.memory, self._ranks.memory, strict=True)
        over = max((held - most for held, most in limits if most is not None), default=0.0)
        seconds, nbytes = (found.score(objective, self._microbatches) for objective in ("speed", "memory"))
        balanced = (seconds, nbytes) if self._objective == "speed" else (nbytes, seconds)
        return (max(0.0, over), *balanced), found

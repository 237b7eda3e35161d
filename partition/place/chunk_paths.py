"""Finds cuts where a stage has several chunks, and a bound for all of them.

    cuts are a path      u0 ── u1 ── u2 ── u3 ── u4 ── u5      a run costs what it sends,
                          └────0────┘└──1──┘└────0────┘        and a toll for what it puts on its stage

What a stage may have binds its runs together, so that no dynamic program over single runs keeps to it. With a toll for
what each stage has, it does: the cheapest path, less the tolls of all that stages may have, is never above the best
cuts. Tolls rise where a path puts too much on a stage, and fall where it puts less. With the best tolls, all paths
that are not above the best known cuts are followed, as far as they are not too many. Those left out are part of the
bound.

Costs of paths are sure ones (`sure_costs`). The cuts that are found are costed by `chunk_search`.

Source:
    Lagrangian relaxation for constrained shortest paths: Handler and Zang, "A dual algorithm for the constrained
    shortest path problem" (Networks 10, 1980).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from smp_tf.partition.place.chunk_search import ChunkSearch, Looked
from smp_tf.partition.place.path_grid import Limit, PathGrid, Places
from smp_tf.partition.place.placement import Chain, Chunks, Ranks
from smp_tf.partition.place.run_costs import Array
from smp_tf.partition.place.sure_costs import Run, SureCosts, runs_of

Cuts = tuple[int, ...]

#: How often tolls change: at some places for cuts, then at all of them.
_TURNS, _LAST_TURNS = 40, 6
#: After how many smaller bounds tolls change half as much.
_PATIENCE = 3
#: How many places there are in the first turns.
_MOST_PLACES = 64
#: How many paths are followed at once: as many as have so many places to go on to, within these numbers.
_MOST_STEPS, _LEAST_PATHS, _MOST_PATHS = 200_000, 600, 3_000
#: The most entries of all tables of runs' costs.
_MOST_ENTRIES = 20_000_000
#: The toll that counts for known cuts which turn out to exceed the limits, as a multiple of what they send.
_UNKNOWN = 2.0
#: The toll of what the known cuts send, where cuts are to be even: so little that it decides between equal ones.
_SENT = 1e-6
#: The factor by which rounding errors may make a sum larger, and the least change that counts.
_ROUNDING, _LEAST = 1 + 1e-9, 1e-9


class _Tolls(NamedTuple):
    """The best tolls that were found.

    Args:
        value: what no path is below.
        tolls: of all that each limit allows.
        paths: the cheapest path with each of the tolls that were tried.
    """

    value: float
    tolls: Array
    paths: list[Places]


class _Known(NamedTuple):
    """The best cuts that are known.

    Args:
        order: what is to be small, then what decides between equal ones.
        cuts: the first units of chunk 1, of chunk 2 and so on.
    """

    order: tuple[float, float]
    cuts: Cuts


class _Aim(NamedTuple):
    """What is to be small.

    Args:
        order: returns it and what decides between equal cuts, for all cuts that were looked at.
        limits: returns what stages may have, given the best that is known.
        sent: the toll of a byte that is sent.
        is_even: whether the fullest stage is to have little. Otherwise few bytes are to be sent.
    """

    order: Callable[[Looked], tuple[Array, Array]]
    limits: Callable[[float], list[Limit]]
    sent: float
    is_even: bool


class ChunkPaths:
    """Finds cuts between chunks.

    Args:
        chain: the units with their costs.
        chunks: where the chunks are, and what they keep.
        objective: "memory" or "speed".
        microbatches: per step.
        ranks: how these differ, and what they may need.
        search: says what cuts cost.
    """

    def __init__(
        self,
        chain: Chain,
        chunks: Chunks,
        objective: str,
        microbatches: int,
        ranks: Ranks,
        search: ChunkSearch,
    ) -> None:
        self._costs = SureCosts(chain, chunks, microbatches)
        self._chunks, self._is_speed, self._ranks, self._search = chunks, objective == "speed", ranks, search
        every = np.arange(self._costs.count + 1)
        places = [every] if len(every) <= _MOST_PLACES else [self._some_places(), every]
        link = chain.seconds_per_byte / microbatches
        #: Some places, and all.
        self._grids = [PathGrid(self._costs, ranks, link, at) for at in places]

    @staticmethod
    def is_too_large(chain: Chain, chunks: Chunks) -> bool:
        """Returns whether all costs of runs would take more memory than a plan may.

        Args:
            chain: the units.
            chunks: where the chunks are.
        """
        return len(runs_of(chunks.placement)) * (len(chain.names) + 1) ** 2 > _MOST_ENTRIES

    def most_even(self, known: Cuts) -> tuple[Cuts, float]:
        """Returns cuts whose fullest, or slowest, stage has little; and below which share of it no cuts are.

        Args:
            known: cuts that are known, within the limits of ranks.
        """

        def order(looked: Looked) -> tuple[Array, Array]:
            return np.where(looked.over > 0, math.inf, looked.load.max(axis=1)), looked.sent

        sent = float(self._search.look(np.asarray([known])).sent[0]) or 1.0
        aim = _Aim(order, lambda best: self._limits(best, of_ranks=False), _SENT / sent, True)
        best, least = self._searched(aim, known)
        return best.cuts, least

    def sends_least(self, load: float, longest: float, known: Cuts) -> tuple[Cuts, float]:
        """Returns the cuts that send the fewest bytes of those found, then have the shortest step; and a bound.

        Args:
            load: what each stage may have of what is balanced.
            longest: seconds that a step may take.
            known: cuts that are known, within these.

        Returns:
            The cuts; and the bytes per step below which no cuts within the limits send.
        """

        def order(looked: Looked) -> tuple[Array, Array]:
            fits = (looked.over <= 0) & (looked.load.max(axis=1) <= load) & (looked.step <= longest)
            return np.where(fits, looked.sent, math.inf), looked.step

        sent = float(self._search.look(np.asarray([known])).sent[0])
        if not sent:
            return known, 0.0
        aim = _Aim(order, lambda _: self._limits(load, of_ranks=True), 1.0 / sent, False)
        best, bound = self._searched(aim, known)
        return best.cuts, bound

    def sends_least_of_all(self) -> Cuts:
        """Returns cuts that send few bytes, whatever stages have."""
        grid = self._grids[-1]
        grid.limits = []
        _, path = grid.cheapest(grid.tolls_of_runs(1.0, np.zeros(0)))
        return tuple(map(int, self._cuts(grid, [path])[0]))

    def _searched(self, aim: _Aim, known: Cuts) -> tuple[_Known, float]:
        """Returns the best cuts that are found, and a bound as `most_even` and `sends_least` return it."""
        best = self._better(aim, _Known((math.inf, math.inf), known), np.asarray([known]))
        tolls: Array | None = None
        for grid in self._grids:
            grid.limits = aim.limits(best.order[0])
            if tolls is None:
                tolls = np.full(len(grid.limits), 1.0 / max(1, len(grid.limits)) if aim.is_even else 0.0)
            turns = _TURNS if grid is self._grids[0] else _LAST_TURNS
            found = self._best_tolls(grid, aim, tolls, best, turns)
            tolls = found.tolls
            best = self._better(aim, best, self._cuts(grid, found.paths))
        assert tolls is not None
        grid.limits = aim.limits(best.order[0])
        less = 0.0 if aim.is_even else float(tolls.sum())
        less -= grid.owned(tolls)[1]
        of_runs = grid.tolls_of_runs(aim.sent, tolls)
        left, _ = grid.cheapest(of_runs)
        target = _target(aim, best)
        count = max(_LEAST_PATHS, min(_MOST_PATHS, _MOST_STEPS // len(grid.places)))
        followed, left_out = grid.followed(of_runs, left, target * _ROUNDING + less, count)
        cuts = self._cuts(grid, list(followed))
        least = min(target, left_out - less)
        if aim.is_even:
            loads = self._search.look(cuts).load.max(axis=1) if len(cuts) else np.zeros(0)
            least = min(least, float(loads.min(initial=best.order[0])) / best.order[0])
            return self._better(aim, best, cuts), least
        sent = self._search.sent(cuts) if len(cuts) else np.zeros(0)
        return self._better(aim, best, cuts), max(0.0, float(sent.min(initial=least / aim.sent)))

    def _best_tolls(self, grid: PathGrid, aim: _Aim, tolls: Array, best: _Known, turns: int) -> _Tolls:
        """Returns the best tolls that are found in so many turns."""
        found = _Tolls(-math.inf, tolls, [])
        # Tolls of other places may be worse than none.
        if tolls.any() and not aim.is_even and _cheapest(grid, aim, 0 * tolls)[0] > _cheapest(grid, aim, tolls)[0]:
            tolls = 0 * tolls
        share, missed, target = 1.0, 0, _target(aim, best)
        for _ in range(turns):
            value, path = _cheapest(grid, aim, tolls)
            if not math.isfinite(value):
                break
            found.paths.append(path)
            if value > found.value:
                found, missed = _Tolls(value, tolls, found.paths), 0
            else:
                missed += 1
            if missed == _PATIENCE:
                share, missed = share / 2, 0
            # A toll rises where a stage has more than it may, or more than all have together.
            loads = grid.owned(tolls)[0] + grid.loads(path)
            over = loads - (float(loads @ tolls) if aim.is_even else 1.0)
            if target - found.value <= _LEAST or not over.any():
                break
            tolls = np.maximum(tolls + share * (target - value) / float(over @ over) * over, 0.0)
            if aim.is_even:
                tolls = tolls / (tolls.sum() or 1.0)
        return found

    def _better(self, aim: _Aim, best: _Known, cuts: Places) -> _Known:
        """Returns the best of some cuts and those that are known."""
        if not len(cuts):
            return best
        first, second = aim.order(self._search.look(cuts))
        at = int(np.lexsort((second, first))[0])
        order = float(first[at]), float(second[at])
        return _Known(order, tuple(map(int, cuts[at]))) if order < best.order else best

    def _limits(self, load: float, *, of_ranks: bool) -> list[Limit]:
        """Returns what stages may have.

        Args:
            load: bytes, or seconds, of what is balanced.
            of_ranks: whether the limits of ranks count as well.
        """
        found = []
        for stage, (moments, memory) in enumerate(zip(self._chunks.moments, self._ranks.memory, strict=True)):
            limit = math.inf if memory is None or not of_ranks else memory
            if self._is_speed:
                found.append(Limit(stage, None, load))
            else:
                limit = min(limit, load)
            held = {
                tuple(
                    min(moment.get(chunk, 0) for chunk in range(run.first, run.last + 1)) * (run.stage == stage)
                    for run in self._costs.runs
                )
                for moment in moments
            }
            found += [Limit(stage, kept, limit) for kept in sorted(held) if math.isfinite(limit)]
        return [limit for limit in found if limit.most > 0]

    def _some_places(self) -> Places:
        """Returns places for cuts: in each piece of an equal load the one where least passes."""
        costs = self._costs
        units = np.arange(costs.count)
        alone = np.diff(costs.times if self._is_speed else costs.weights)
        if not self._is_speed:
            alone = alone + costs.stash[units, units + 1]
        piece = np.minimum(np.cumsum(alone) / (alone.sum() or 1.0) * _MOST_PLACES, _MOST_PLACES - 1).astype(int)
        found: dict[int, tuple[float, int]] = {}
        for at, nbytes in enumerate(costs.passes):
            if piece[at] not in found or nbytes < found[piece[at]][0]:
                found[piece[at]] = nbytes, at + 1
        return np.asarray(sorted({0, costs.count, *(at for _, at in found.values())}))

    def _cuts(self, grid: PathGrid, paths: Sequence[Places]) -> Places:
        """Returns the cuts of paths, once each."""
        rows = dict.fromkeys(tuple(map(int, grid.places[path])) for path in paths)
        return np.asarray([self._between_chunks(row) for row in rows], np.int64)

    def _between_chunks(self, borders: Cuts) -> Cuts:
        """Returns the cuts between all chunks, by those between runs of chunks."""
        found: list[int] = []
        for run, (begin, end) in zip(self._costs.runs, pairwise((0, *borders, self._costs.count)), strict=True):
            if begin:
                found.append(begin)
            if run.last == run.first + 1:
                found.append(self._middle(run, begin, end))
            else:
                many = run.last - run.first + 1
                found += [begin + (end - begin) * number // many for number in range(1, many)]
        return tuple(found)

    def _middle(self, run: Run, begin: int, end: int) -> int:
        """Returns the cut between two chunks that follow each other on a stage: where least is kept."""
        stash, middles = self._costs.stash, np.arange(begin + 1, end)
        kept = [
            moment.get(run.first, 0) * stash[begin, middles] + moment.get(run.last, 0) * stash[middles, end]
            for moment in self._chunks.moments[run.stage]
        ]
        return int(middles[np.max(kept, axis=0).argmin()])


def _cheapest(grid: PathGrid, aim: _Aim, tolls: Array) -> tuple[float, Places]:
    """Returns what no path is below, and the cheapest path."""
    left, path = grid.cheapest(grid.tolls_of_runs(aim.sent, tolls))
    allowed = 0.0 if aim.is_even else float(tolls.sum())
    return float(left[0][0]) + grid.owned(tolls)[1] - allowed, path


def _target(aim: _Aim, best: _Known) -> float:
    """Returns the toll of the best cuts that are known, above which no path is of use."""
    if aim.is_even or not math.isfinite(best.order[0]):
        return 1.0 if aim.is_even else _UNKNOWN
    return best.order[0] * aim.sent

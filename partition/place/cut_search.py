"""Finds the best of all cuts of a chain by dynamic programming, over given costs of runs.

    units   u0  u1  u2  u3  u4  u5  u6      best[k][j]: the first j units in k stages, at best
    stages  [───0───]  [──1──]  [──2──]     = min over i of worse(best[k - 1][i], cost of [i, j))

Only runs that are part of a cut within the bounds are looked at. Where two costs count, one after the other, those runs
are left that are part of a cut whose first cost is least, and the second decides among these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.place.placement import Ranks, step_time
from smp_tf.partition.place.run_costs import UNREACHABLE, Array, RunCosts

_Places = NDArray[np.int64]
#: The costs of runs on a stage, from each begin to each end.
_Costs = Callable[[int, _Places, _Places], Array]

#: How often the slowest stage is given less time, where a cut that sends little makes the step too long.
_MOST_TIGHTER = 16
#: The share of rounding errors of sums.
_ROUNDING = 1e-12


class _Runs(NamedTuple):
    """The runs that a stage may be.

    Args:
        begins: first units, ascending.
        ends: the units after the last ones, ascending. They are the first units of the next stage.
        legal: for each begin and end whether such a run may be the stage.
    """

    begins: _Places
    ends: _Places
    legal: NDArray[np.bool_]


@dataclass(frozen=True)
class Most:
    """What a placement may have at most, besides the limits of ranks.

    Args:
        memory: bytes of a stage.
        time: seconds of a stage per microbatch.
        step: seconds of a step.
    """

    memory: float = math.inf
    time: float = math.inf
    step: float = math.inf


#: The runs of all cuts that count, by stage. Each run is part of such a cut.
_Ways = list[_Runs]


class CutSearch:
    """Finds best cuts over given costs. Every method returns cuts, or None where none is legal.

    Args:
        costs: of every run.
        starts: for every stage and end, the first start of a run that is legal there.
        in_flight: microbatches whose stash each stage holds.
        microbatches: per step.
        ranks: how these differ, and what they may need.
    """

    def __init__(
        self,
        costs: RunCosts,
        starts: NDArray[np.int64],
        in_flight: Sequence[int],
        microbatches: int,
        ranks: Ranks,
    ) -> None:
        self._costs = costs
        self._microbatches = microbatches
        self._ranks = ranks
        self._in_flight = in_flight
        self._limits = [UNREACHABLE if limit is None else limit for limit in ranks.memory]
        self._stages = len(in_flight)
        self._any = self._all_ways(starts)

    def of_cuts(self, cuts: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the time and memory of every stage.

        Args:
            cuts: first unit of stage 1, of stage 2 and so on.
        """
        runs = [
            (stage, np.asarray([begin]), np.asarray([end]))
            for stage, (begin, end) in enumerate(pairwise((0, *cuts, self._costs.count)))
        ]
        return (
            tuple(float(self._time(*run)[0, 0]) for run in runs),
            tuple(float(self._memory(*run)[0, 0]) for run in runs),
        )

    def sent(self, cuts: Sequence[int]) -> float:
        """Returns the bytes that a step sends.

        Args:
            cuts: first unit of stage 1, of stage 2 and so on.
        """
        bounds = (0, *cuts, self._costs.count)
        return float(self._costs.sent[list(bounds[:-1]), list(bounds[1:])].sum())

    def step_time(self, cuts: Sequence[int]) -> float:
        """Estimates the seconds of a step.

        Args:
            cuts: first unit of stage 1, of stage 2 and so on.
        """
        return step_time(self.of_cuts(cuts)[0], self._microbatches)

    def smallest(self, tolerance: float) -> tuple[tuple[int, ...] | None, float]:
        """Returns the cuts with the least memory on the fullest stage, then the least step time; and that memory.

        Args:
            tolerance: the share by which the fullest stage may have more than the least.
        """
        ways = self._within(self._any, Most())
        if ways is None:
            return None, UNREACHABLE
        least = max(self.of_cuts(self._minimise(self._memory, np.maximum, ways))[1])
        return self._fastest_within(Most(memory=least * (1 + tolerance)), among=ways), least

    def fastest(self, tolerance: float) -> tuple[tuple[int, ...] | None, float]:
        """Returns the cuts with the least step time, then the least memory on the fullest stage; and that time.

        Args:
            tolerance: the share by which the step may be longer than the shortest.
        """
        cuts = self._fastest_within(Most())
        if cuts is None:
            return None, UNREACHABLE
        least = self.step_time(cuts)
        slowest = max(self.of_cuts(cuts)[0]) * (1 + tolerance)
        ways = self._within(self._any, Most(time=slowest))
        if ways is None:
            return cuts, least
        leanest = self._minimise(self._memory, np.maximum, ways)
        lean = self._fastest_within(Most(memory=max(self.of_cuts(leanest)[1]))) or cuts
        return (lean if self.step_time(lean) <= least * (1 + tolerance) else cuts), least

    def sends_least(self, most: Most, *, by_step: bool = True) -> tuple[tuple[int, ...] | None, float]:
        """Returns the cuts that send the fewest bytes, then have the least step time; and a bound.

        Args:
            most: what stages and the step may have.
            by_step: whether of equal cuts the one with the least step time is searched for, and not the one whose
                slowest stage takes least. Without it, the step may take any time.

        Returns:
            The cuts, None where none was found; and the bytes of a step below which no cut within `most` sends.
        """
        ways = self._within(self._any, most)
        if ways is None:
            return None, UNREACHABLE
        ways, bound = self._that_send_least(ways)
        if not by_step:
            return self._minimise(self._time, np.maximum, ways), bound
        cuts = self._fastest_within(Most(), among=ways)
        for _ in range(_MOST_TIGHTER):
            if cuts is None or self.step_time(cuts) <= most.step:
                return cuts, bound
            # With no smaller sum of times, the slowest stage must take as much less as the step takes too long.
            times, others = self.of_cuts(cuts)[0], self._microbatches - 1
            slowest = min(math.nextafter(max(times), 0.0), (most.step - sum(times)) / others if others else math.inf)
            within = self._within(self._any, Most(most.memory, slowest))
            if within is None:
                return None, bound
            cuts = self._fastest_within(Most(), among=self._that_send_least(within)[0])
        return None, bound

    def _fastest_within(self, most: Most, *, among: _Ways | None = None) -> tuple[int, ...] | None:
        """Returns the cut with the least sum of times + (microbatches - 1) longest time, within what stages may have.

        The search starts at the cut with the least sum. It bounds the longest time lower and lower, until the gain that
        is left cannot make up for the larger sum. The smallest longest time of any cut is the floor.

        Args:
            most: what stages may have. The step may take any time.
            among: the cuts that count; None for all.
        """
        ways = self._within(among or self._any, most)
        if ways is None:
            return None
        evenest = self._minimise(self._time, np.maximum, ways)
        floor = max(self.of_cuts(evenest)[0])
        best, bound = evenest, most.time
        # Of the most even cuts, the one with the least sum.
        even = self._within(ways, Most(time=min(bound, floor * (1 + _ROUNDING))))
        if even is not None:
            cuts = self._minimise(self._time, np.add, even)
            best = cuts if self.step_time(cuts) < self.step_time(best) else best
        while True:
            ways = self._within(ways, Most(time=bound))
            if ways is None:
                return best
            cuts = self._minimise(self._time, np.add, ways)
            times, _ = self.of_cuts(cuts)
            if self.step_time(cuts) < self.step_time(best):
                best = cuts
            least, others = self.step_time(best) * (1 - _ROUNDING), self._microbatches - 1
            if sum(times) + others * floor >= least:
                return best
            # A more even cut has no smaller sum. To be better, its longest time must make up for that. It is below the
            # longest in any case, since sums of sizes that cancel out may leave a time just under zero.
            bound = np.nextafter(min(max(times), max(times) * (1 - _ROUNDING)), -np.inf)
            if others:
                bound = min(bound, (least - sum(times)) / others)

    def _minimise(self, costs: _Costs, combine: np.ufunc, ways: _Ways) -> tuple[int, ...]:
        """Returns the cuts whose combined cost is least.

        Args:
            costs: returns the costs of runs, on a stage.
            combine: np.maximum or np.add.
            ways: the cuts that count.
        """
        best = np.zeros(1)
        choices = []
        for stage, (begins, ends, legal) in enumerate(ways):
            total = np.where(legal, combine(best[:, None], costs(stage, begins, ends)), UNREACHABLE)
            choice = total.argmin(axis=0)
            best = total[choice, np.arange(len(choice))]
            choices.append(choice)
        cuts, at = [], 0
        for stage in range(self._stages - 1, 0, -1):
            at = int(choices[stage][at])
            cuts.append(int(ways[stage].begins[at]))
        return tuple(reversed(cuts))

    def _that_send_least(self, ways: _Ways) -> tuple[_Ways, float]:
        """Returns, of some cuts, those that send the fewest bytes; and these bytes.

        A run is in such a cut where the least that is sent before it, by it and after it adds up to the least of all.
        """
        sent = [self._sent(stage, begins, ends) for stage, (begins, ends, _) in enumerate(ways)]
        before, after = [np.zeros(1)], [np.zeros(1)]
        for nbytes, (_, _, legal) in zip(sent, ways, strict=True):
            before.append(np.where(legal, before[-1][:, None] + nbytes, UNREACHABLE).min(axis=0))
        for nbytes, (_, _, legal) in zip(sent[::-1], ways[::-1], strict=True):
            after.append(np.where(legal, nbytes + after[-1], UNREACHABLE).min(axis=1))
        least = float(before[-1][0])
        most = least + _ROUNDING * max(1.0, abs(least))
        kept = [
            _Runs(begins, ends, legal & (before[at][:, None] + nbytes + after[-2 - at] <= most))
            for at, (nbytes, (begins, ends, legal)) in enumerate(zip(sent, ways, strict=True))
        ]
        found = self._within(kept, Most())
        assert found is not None, "a cut that sends the fewest bytes is one of those that were given"
        return found, least

    def _all_ways(self, starts: NDArray[np.int64]) -> _Ways:
        """Returns the runs of all cuts. Each later stage needs a unit, too."""
        count, last = self._costs.count, self._stages - 1
        places = [np.arange(stage, count - last + stage) for stage in range(1, self._stages)]
        places = [np.asarray([0]), *places, np.asarray([count])]
        return [
            _Runs(begins, ends, (begins[:, None] >= starts[stage][ends]) & (begins[:, None] < ends))
            for stage, (begins, ends) in enumerate(pairwise(places))
        ]

    def _within(self, ways: _Ways, most: Most) -> _Ways | None:
        """Returns the runs of those of some cuts that keep within bounds; None where no cut does.

        Args:
            ways: the runs of the cuts.
            most: what no stage may exceed, besides the limit of its rank. The step may take any time.
        """
        found: _Ways = []
        kept = np.arange(1)
        for stage, (begins, ends, legal) in enumerate(ways):
            begins, legal = begins[kept], _rows(legal, kept)
            memory = min(most.memory, self._limits[stage])
            if memory != UNREACHABLE:
                legal = legal & (self._memory(stage, begins, ends) <= memory)
            if most.time != UNREACHABLE:
                legal = legal & (self._time(stage, begins, ends) <= most.time)
            kept = np.flatnonzero(legal.any(axis=0))
            if not len(kept):
                return None
            found.append(_Runs(begins, ends[kept], _rows(legal.T, kept).T))
        kept = np.arange(1)
        for stage in range(self._stages - 1, -1, -1):
            begins, ends, legal = found[stage]
            legal = _rows(legal.T, kept).T
            ends, kept = ends[kept], np.flatnonzero(legal.any(axis=1))
            found[stage] = _Runs(begins[kept], ends, _rows(legal, kept))
        return found

    def _time(self, stage: int, begins: _Places, ends: _Places) -> Array:
        """Returns the seconds of runs on a stage, from each begin to each end."""
        table, ranks = self._costs, self._ranks
        compute, moved = _part(table.compute, begins, ends), _part(table.moved, begins, ends)
        return compute / ranks.speed[stage] + moved / ranks.link[stage]

    def _memory(self, stage: int, begins: _Places, ends: _Places) -> Array:
        """Returns the bytes of runs on a stage, from each begin to each end."""
        weights, stash = (_part(table, begins, ends) for table in (self._costs.weights, self._costs.stash))
        return weights + self._in_flight[stage] * stash

    def _sent(self, stage: int, begins: _Places, ends: _Places) -> Array:
        """Returns the bytes that runs receive per step, from each begin to each end, on any stage."""
        return _part(self._costs.sent, begins, ends)


def _part(table: Array, begins: _Places, ends: _Places) -> Array:
    """Returns the rows and columns of a table; without a copy where they are neighbours."""
    if _are_neighbours(begins) and _are_neighbours(ends):
        return table[begins[0] : begins[-1] + 1, ends[0] : ends[-1] + 1]
    return table[np.ix_(begins, ends)]


def _rows(table: NDArray[np.bool_], kept: _Places) -> NDArray[np.bool_]:
    """Returns some rows of a table; without a copy where they are neighbours."""
    return table[kept[0] : kept[-1] + 1] if _are_neighbours(kept) else table[kept]


def _are_neighbours(places: _Places) -> bool:
    return len(places) > 0 and int(places[-1] - places[0]) == len(places) - 1

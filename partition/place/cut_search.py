"""Finds the best of all cuts of a chain by dynamic programming, over given costs of runs.

    units   u0  u1  u2  u3  u4  u5  u6      best[k][j]: the first j units in k stages, at best
    stages  [───0───]  [──1──]  [──2──]     = min over i of worse(best[k - 1][i], cost of [i, j))

Where two costs count, one after the other, the second decides among the cuts whose first cost is least. Both add up, or
the larger counts. A better begin is never worse at the end, so this is as exact as with one cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.place.placement import Ranks, step_time
from smp_tf.partition.place.run_costs import UNREACHABLE, Array, RunCosts

#: How often the slowest stage is given less time, where a cut that sends little makes the step too long.
_MOST_TIGHTER = 16
#: The share of rounding errors of sums.
_ROUNDING = 1e-12


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
        self._starts = starts
        self._microbatches = microbatches
        self._limits = [UNREACHABLE if limit is None else limit for limit in ranks.memory]
        self._stages = len(in_flight)
        # Ranks that are alike share an array.
        speeds = list(zip(ranks.speed, ranks.link, strict=True))
        time_of = {speed: costs.time(*speed) for speed in set(speeds)}
        memory_of = {kept: costs.memory(kept) for kept in set(in_flight)}
        self._time = [time_of[speed] for speed in speeds]
        self._memory = [memory_of[kept] for kept in in_flight]
        self._sent = [costs.sent] * self._stages

    def of_cuts(self, cuts: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the time and memory of every stage.

        Args:
            cuts: first unit of stage 1, of stage 2 and so on.
        """
        runs = list(enumerate(pairwise((0, *cuts, self._costs.count))))
        return (
            tuple(float(self._time[r][a, b]) for r, (a, b) in runs),
            tuple(float(self._memory[r][a, b]) for r, (a, b) in runs),
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
        cuts = self._minimise(self._memory, np.maximum)
        if cuts is None:
            return None, UNREACHABLE
        least = max(self.of_cuts(cuts)[1])
        return self._fastest_within(Most(memory=least * (1 + tolerance))), least

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
        lean = self._minimise(self._memory, np.maximum, Most(time=slowest))
        if lean is None:
            return cuts, least
        lean = self._fastest_within(Most(memory=max(self.of_cuts(lean)[1]))) or cuts
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
        cuts = self._fastest_within(most, as_first=True) if by_step else self._quickest(np.maximum, most, as_first=True)
        if cuts is None:
            return None, UNREACHABLE
        bound = self.sent(cuts)
        if not by_step:
            return cuts, bound
        for _ in range(_MOST_TIGHTER):
            if cuts is None or self.step_time(cuts) <= most.step:
                return cuts, bound
            # With no smaller sum of times, the slowest stage must take as much less as the step takes too long.
            times, others = self.of_cuts(cuts)[0], self._microbatches - 1
            slowest = min(math.nextafter(max(times), 0.0), (most.step - sum(times)) / others if others else math.inf)
            cuts = self._fastest_within(Most(most.memory, slowest, most.step), as_first=True)
        return None, bound

    def _fastest_within(self, most: Most, *, as_first: bool = False) -> tuple[int, ...] | None:
        """Returns the cut with the least sum of times + (microbatches - 1) longest time, within what stages may have.

        The search starts at the cut with the least sum. It bounds the longest time lower and lower, until the gain that
        is left cannot make up for the larger sum. The smallest longest time of any cut is the floor.

        Args:
            most: what stages may have. The step may take any time.
            as_first: whether only cuts that send the fewest bytes count.
        """
        evenest = self._quickest(np.maximum, most, as_first=as_first)
        if evenest is None:
            return None
        least_sent = self.sent(evenest)
        floor = max(self.of_cuts(evenest)[0])
        best, bound = evenest, most.time

        def summed(time: float) -> tuple[int, ...] | None:
            cuts = self._quickest(np.add, Most(most.memory, time), as_first=as_first)
            return None if cuts is None or (as_first and self.sent(cuts) > least_sent * (1 + _ROUNDING)) else cuts

        # Of the most even cuts, the one with the least sum.
        even = summed(min(bound, floor * (1 + _ROUNDING)))
        if even is not None and self.step_time(even) < self.step_time(best):
            best = even
        while True:
            cuts = summed(bound)
            if cuts is None:
                return best
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

    def _quickest(self, combine: np.ufunc, most: Most, *, as_first: bool) -> tuple[int, ...] | None:
        """Returns the cuts with the least time, summed or of the slowest stage; perhaps of those that send least."""
        if not as_first:
            return self._minimise(self._time, combine, most)
        return self._minimise(self._sent, np.add, most, then=(self._time, combine))

    def _minimise(
        self,
        costs: Sequence[Array],
        combine: np.ufunc,
        most: Most = Most(),
        then: tuple[Sequence[Array], np.ufunc] | None = None,
    ) -> tuple[int, ...] | None:
        """Returns the cuts whose combined cost is least, with every stage within the given bounds.

        Args:
            costs: the cost of every run, on each stage.
            combine: np.maximum or np.add.
            most: what no stage may exceed, besides the limit of its rank.
            then: the cost that decides where the first is equal, and how it is combined.
        """
        count = self._costs.count
        ends = np.arange(count + 1)
        best = np.full(count + 1, UNREACHABLE)
        best[0] = 0.0
        second = best
        choices = []
        for stage in range(self._stages):
            legal = self._legal(stage, most)
            total = np.where(legal, combine(best[:, None], costs[stage]), UNREACHABLE)
            if then is None:
                choice = total.argmin(axis=0)
            else:
                others, joined = then
                also = np.where(total == total.min(axis=0), joined(second[:, None], others[stage]), UNREACHABLE)
                choice = also.argmin(axis=0)
                second = also[choice, ends]
            best = total[choice, ends]
            choices.append(choice)
        if not np.isfinite(best[count]):
            return None
        cuts, end = [], count
        for choice in reversed(choices[1:]):
            end = int(choice[end])
            cuts.append(end)
        return tuple(reversed(cuts))

    def _legal(self, stage: int, most: Most) -> NDArray[np.bool_]:
        """Returns for every run whether it may be a stage."""
        begins = np.arange(self._costs.count + 1)[:, None]
        legal = (begins >= self._starts[stage][None, :]) & np.isfinite(self._costs.compute)
        memory = min(most.memory, self._limits[stage])
        if memory != UNREACHABLE:
            legal &= self._memory[stage] <= memory
        if most.time != UNREACHABLE:
            legal &= self._time[stage] <= most.time
        return np.asarray(legal)

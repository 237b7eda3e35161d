"""Finds the placement that sends the fewest bytes where few units may be on either side of each border.

    first and last stage of units, by stage_limits      0    0    0-1   0-1    1-2    2
                                                        a ─▶ b ─▶ c ─▶ d ───▶ e ───▶ f
    what can be before the border after stage 0         ab   abc  abcd
    and after stage 1                                   abcd abcde

With each unit, all that it needs is before a border. Such sets are few where balance leaves most units one stage. What
a stage computes, keeps and receives depends on nothing but the set before it and the set up to its end. So a dynamic
program over all pairs of such sets finds the best of all placements, in any order.

Source:
    Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020), section 4: the
    dynamic program over ideals; here for bytes sent within limits, with stashes and shared weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.place.asked import Asked
from smp_tf.partition.place.cut_search import Most
from smp_tf.partition.place.placement import Placement, costed

_Flags = NDArray[np.bool_]
_Array = NDArray[np.float64]
#: The most sets at a border, and the most pairs of sets that a stage may lie between.
_MOST_SETS, _MOST_PAIRS = 10_000, 60_000
#: The factor by which rounding errors may make a sum larger.
_ROUNDING = 1 + 1e-12
#: Returns how many of some units are on a stage, or an array of such numbers.
_Count = Callable[[tuple[int, ...]], Any]


class _Costs(NamedTuple):
    """What a stage costs, for each set before it and each set up to its end.

    Args:
        time: seconds per microbatch; infinity where the stage has no unit.
        memory: bytes, without what only the owner of a shared weight has.
        sent: bytes per microbatch that it receives, and the values of shared weights that it uses.
    """

    time: _Array
    memory: _Array
    sent: _Array


class _Part(NamedTuple):
    """Something that a stage has, computes or receives, depending on which units are on it.

    Args:
        units: the units on which it depends.
        holds: returns whether a stage has it, by the number of some units that are on the stage.
        memory, moved, sent: bytes of it that are kept, that take time on the link, and that are received.
    """

    units: tuple[int, ...]
    holds: Callable[[_Count], Any]
    memory: float = 0.0
    moved: float = 0.0
    sent: float = 0.0


class BorderSearch:
    """Finds placements whose units keep to given stages.

    Args:
        asked: what is placed. Each stage has one chunk.
        within: the first and the last stage that every unit may be on.
    """

    def __init__(self, asked: Asked, within: tuple[Sequence[int], Sequence[int]]) -> None:
        self._asked, self._stages = asked, asked.chunks.stages
        self._first, self._last = within
        sets = [self._before(border) for border in range(-1, self._stages)]
        #: For each border, with both ends of the model, a row for each set with whether units are in it.
        self._sets = [rows for rows in sets if rows is not None]
        pairs = [len(one) * len(other) for one, other in pairwise(self._sets)]
        #: Whether there are too many sets for a search.
        self.is_too_large = len(self._sets) < len(sets) or max(pairs) > _MOST_PAIRS

    def sends_least(self, most: Most) -> tuple[Placement | None, float]:
        """Returns the placement that sends the fewest bytes, and a bound for all placements.

        Args:
            most: what stages may have. The step may take any time.

        Returns:
            The placement; None where there is none. The owner of a shared weight may have more than it should. And the
            bytes per microbatch below which no placement sends.
        """
        assert not self.is_too_large
        costs, ranks = self._costs(), self._asked.ranks.memory
        longest = min(most.time * _ROUNDING, sys.float_info.max)
        limits = [most.memory if limit is None else min(limit, most.memory) for limit in ranks]
        sent = [
            np.where((one.memory <= limit * _ROUNDING) & (one.time <= longest), one.sent, np.inf)
            for one, limit in zip(costs, limits, strict=True)
        ]
        least, chosen = _best(sent, np.add)
        if chosen is None:
            return None, np.inf
        # Of those that send as little, the one whose slowest stage takes least.
        few = _ways_of(sent, least)
        times = [np.where(kept, one.time, np.inf) for kept, one in zip(few, costs, strict=True)]
        chosen = _best(times, np.maximum)[1] or chosen
        upto = [rows[at] for rows, at in zip(self._sets[1:], chosen, strict=True)]
        stage_of = self._stages - np.sum(upto, axis=0)
        # Of the stages that use a shared weight all but the owner receive it.
        once = sum(weight.crossing for weight in self._asked.chain.weights if len(weight.users) > 1)
        return self._placed(tuple(stage_of.tolist())), max(0.0, least - once / self._asked.microbatches)

    def _before(self, border: int) -> _Flags | None:
        """Returns every set of units that can be before the border after a stage; None where there are too many."""
        rows = np.asarray([[last <= border for last in self._last]])
        needed: dict[int, list[int]] = {}
        for before, after in self._asked.pairs:
            needed.setdefault(after, []).append(before)
        for unit, (first, last) in enumerate(zip(self._first, self._last, strict=True)):
            if first <= border < last:
                more = rows[rows[:, needed.get(unit, [])].all(axis=1)]
                more[:, unit] = True
                rows = np.concatenate([rows, more])
            if len(rows) > _MOST_SETS:
                return None
        return rows

    def _costs(self) -> list[_Costs]:
        """Returns what each stage costs."""
        chain, ranks = self._asked.chain, self._asked.ranks
        stages = [_Between(before, upto) for before, upto in pairwise(self._sets)]
        memory, moved, sent = ([np.zeros(stage.possible.shape) for stage in stages] for _ in range(3))
        held = self._asked.chunks.in_flight
        for part, is_kept_of_each in self._parts():
            firsts, lasts = ([stages[unit] for unit in part.units] for stages in (self._first, self._last))
            for at in range(min(firsts), max(lasts) + 1):
                if any(first < last and first <= at <= last for first, last in zip(firsts, lasts, strict=True)):
                    holds = part.holds(stages[at].count)
                else:
                    holds = part.holds(_count_of(self._last, at))
                if holds is False:
                    continue
                times = held[at] if is_kept_of_each else 1
                for total, nbytes in ((memory, times * part.memory), (moved, part.moved), (sent, part.sent)):
                    if nbytes:
                        total[at] += nbytes * holds
        found = []
        for at, stage in enumerate(stages):
            time = stage.added(np.asarray(chain.times)) / ranks.speed[at]
            time += moved[at] * (chain.seconds_per_byte / ranks.link[at])
            found.append(_Costs(np.where(stage.possible, time, np.inf), memory[at], sent[at]))
        return found

    def _parts(self) -> Iterator[tuple[_Part, bool]]:
        """Yields all that stages have but what they compute, and whether it is kept for each microbatch in flight."""
        chain, microbatches = self._asked.chain, self._asked.microbatches
        for flow in chain.flows:
            units = flow.producer, *flow.consumers
            if len({self._first[unit] for unit in units} | {self._last[unit] for unit in units}) == 1:
                continue
            yield _Part(units, _receives(flow.producer, flow.consumers), sent=flow.nbytes), False
            for readers in (
                tuple(unit for unit in flow.consumers if unit > flow.producer),
                tuple(unit for unit in flow.consumers if unit < flow.producer),
            ):
                if readers:
                    for holds in (_receives(flow.producer, readers), _sends(flow.producer, readers)):
                        yield _Part(units, holds, moved=chain.bytes_of(flow)), False
        for stash in chain.stashes:
            yield _Part(stash.readers, _uses(stash.readers), memory=stash.nbytes), True
        for weight in chain.weights:
            if len(weight.users) == 1:
                yield _Part(weight.users, _uses(weight.users), memory=weight.stored), False
                continue
            crossing = weight.crossing / microbatches
            yield _Part(weight.users, _uses(weight.users), memory=weight.copied, sent=crossing), False
            yield _Part(weight.users, _shares(weight.users), moved=chain.bytes_across(weight) / microbatches), False

    def _placed(self, stage_of: tuple[int, ...]) -> Placement:
        """Returns a placement, in which a shared weight is owned by the stage that has most room for it."""
        asked = self._asked
        alone = costed(asked.chain, stage_of, {}, asked.microbatches, asked.chunks, asked.ranks)
        limits = [math.inf if limit is None else limit for limit in asked.ranks.memory]
        differ = len(set(limits)) > 1
        left = [(limit if differ else 0.0) - has for limit, has in zip(limits, alone.memory, strict=True)]
        owners: dict[int, int] = {}
        for weight in sorted(asked.chain.weights, key=lambda weight: weight.copied - weight.stored):
            used = sorted({stage_of[user] for user in weight.users})
            left[stage_of[weight.users[0]]] += weight.stored - weight.copied
            owners[weight.variable] = max(used, key=left.__getitem__)
            left[owners[weight.variable]] -= weight.stored - weight.copied
        return costed(asked.chain, stage_of, owners, asked.microbatches, asked.chunks, asked.ranks)


class _Between:
    """The units of a stage: those between a set before it and a set up to its end, for each pair of such sets."""

    def __init__(self, before: _Flags, upto: _Flags) -> None:
        self._before, self._upto = before, upto
        in_both = before.astype(np.float64) @ upto.T
        #: Whether the first set is in the second one, and the stage has a unit.
        self.possible = (in_both == before.sum(axis=1)[:, None]) & (in_both < upto.sum(axis=1))

    def added(self, amounts: _Array) -> _Array:
        """Returns the sum of what the units have."""
        return np.asarray(self._upto @ amounts - (self._before @ amounts)[:, None])

    def count(self, units: tuple[int, ...]) -> NDArray[np.int64]:
        """Returns how many of some units are on the stage."""
        listed = list(units)
        return np.asarray(self._upto[:, listed].sum(axis=1) - self._before[:, listed].sum(axis=1)[:, None])


def _count_of(stage_of: Sequence[int], stage: int) -> _Count:
    """Returns what counts units that are on a stage, where all of them have one stage."""
    return lambda units: sum(stage_of[unit] == stage for unit in units)


def _uses(units: tuple[int, ...]) -> Callable[[_Count], Any]:
    return lambda count: count(units) > 0


def _shares(units: tuple[int, ...]) -> Callable[[_Count], Any]:
    return lambda count: (count(units) > 0) & (count(units) < len(units))


def _receives(producer: int, readers: tuple[int, ...]) -> Callable[[_Count], Any]:
    return lambda count: (count(readers) > 0) & (count((producer,)) == 0)


def _sends(producer: int, readers: tuple[int, ...]) -> Callable[[_Count], Any]:
    return lambda count: (count((producer,)) > 0) & (count(readers) < len(readers))


def _best(costs: Sequence[_Array], combine: np.ufunc) -> tuple[float, tuple[int, ...] | None]:
    """Returns the least combined cost, and the set at the end of each stage; None where all are infinite."""
    best, choices = np.zeros(1), []
    for cost in costs:
        total = combine(best[:, None], cost)
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    if not np.isfinite(best[0]):
        return math.inf, None
    chosen = [0]
    for choice in choices[:0:-1]:
        chosen.append(int(choice[chosen[-1]]))
    return float(best[0]), tuple(reversed(chosen))


def _ways_of(sent: Sequence[_Array], least: float) -> list[_Flags]:
    """Returns the pairs of sets that are part of a placement that sends the fewest bytes."""
    before, after = [np.zeros(1)], [np.zeros(1)]
    for cost in sent:
        before.append((before[-1][:, None] + cost).min(axis=0))
    for cost in sent[::-1]:
        after.append((cost + after[-1]).min(axis=1))
    most = least * _ROUNDING
    return [before[at][:, None] + cost + after[-2 - at] <= most for at, cost in enumerate(sent)]

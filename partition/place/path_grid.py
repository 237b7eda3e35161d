"""Tolls of paths over places for cuts, where a run costs what it sends and a toll for what its stage may have.

places    0 ──── 4 ──── 9 ──── 14       a path: 0, 4, 14, the runs [0, 4) and [4, 14)
          └──0──┘└──────1──────┘        the loads: what each stage has, as a share of what it may have
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.place.run_costs import Array
from smp_tf.partition.place.sure_costs import SureCosts

_Flags = NDArray[np.bool_]
#: The share of what a stage may have that it may have, with rounding errors of sums.
_FULL = 1 + 1e-12
#: The part of all paths that may end at one place.
_SHARE = 32
#: Numbers of places.
Places = NDArray[np.int64]


class Limit(NamedTuple):
    """What a stage may have.

    Args:
        stage: the stage.
        held: for each run how many of its stashes count; None where seconds are limited.
        most: bytes, or seconds per microbatch.
    """

    stage: int
    held: tuple[int, ...] | None
    most: float


class PathGrid:
    """Paths over some places for cuts.

    Args:
        costs: sure costs of runs.
        ranks: how these differ.
        link: the seconds that a byte of a step takes, per microbatch.
        places: the places, with both ends of the model.
    """

    def __init__(self, costs: SureCosts, ranks: Ranks, link: float, places: Places) -> None:
        is_whole = len(places) == costs.count + 1
        table = ... if is_whole else np.ix_(places, places)
        self.places, self._runs = places, costs.runs
        #: What stages may have.
        self.limits: Sequence[Limit] = ()
        self._sent, self._stash = [sent[table] for sent in costs.sent], costs.stash[table]
        self._times, self._weights = costs.times[places], costs.weights[places]
        self._speed, self._link = ranks.speed, [link / rate for rate in ranks.link]
        self._owned = costs.owned

    def tolls_of_runs(self, sent: float, tolls: Array) -> list[Array]:
        """Returns the toll of each run, from each begin to each end.

        Args:
            sent: the toll of a byte that is sent, above zero.
            tolls: of all that each limit allows.
        """
        found = []
        for number, run in enumerate(self._runs):
            byte, kept, alone = sent, 0.0, np.zeros(len(self.places))
            for (stage, held, most), toll in zip(self.limits, tolls.tolist(), strict=True):
                if stage != run.stage:
                    continue
                if held is None:
                    byte += toll / most * self._link[stage]
                    alone += toll / most / self._speed[stage] * self._times
                else:
                    kept += toll / most * held[number]
                    alone += toll / most * self._weights
            total = self._sent[number] * byte
            total += alone - alone[:, None]
            if kept:
                total += kept * self._stash
            found.append(total)
        return found

    def cheapest(self, of_runs: Sequence[Array]) -> tuple[list[Array], Places]:
        """Returns the least toll of runs from each one on, for each place where it begins; and the cheapest path."""
        left = [np.where(np.arange(len(self.places)) == len(self.places) - 1, 0.0, np.inf)]
        for toll in reversed(of_runs):
            left.append((toll + left[-1]).min(axis=1))
        left.reverse()
        at, path = 0, []
        for toll, after in zip(of_runs, left[1:], strict=True):
            at = int((toll[at] + after).argmin())
            path.append(at)
        return left, np.asarray(path[:-1])

    def owned(self, tolls: Array) -> tuple[Array, float]:
        """Returns where what owners of shared weights have costs least, as loads, and its toll.

        Args:
            tolls: of all that each limit allows.
        """
        loads = np.zeros(len(self.limits))
        stages = {limit.stage for limit in self.limits if limit.held is not None}
        if not self._owned or stages != {run.stage for run in self._runs}:
            return loads, 0.0
        of_stage = {stage: 0.0 for stage in sorted(stages)}
        for (stage, held, most), toll in zip(self.limits, tolls.tolist(), strict=True):
            if held is not None:
                of_stage[stage] += toll / most
        least = min(of_stage, key=of_stage.__getitem__)
        for at, (stage, held, most) in enumerate(self.limits):
            if stage == least and held is not None:
                loads[at] = self._owned / most
        return loads, self._owned * of_stage[least]

    def loads(self, path: Places) -> Array:
        """Returns what stages have of what they may have, for each limit.

        Args:
            path: numbers of places.
        """
        bounds = (0, *path.tolist(), len(self.places) - 1)
        return sum(
            (
                self._load_of(number, np.asarray([begin]), np.asarray([end]))[0]
                for number, (begin, end) in enumerate(pairwise(bounds))
            ),
            np.zeros(len(self.limits)),
        )

    def _load_of(self, number: int, begins: Places, ends: Places) -> Array:
        """Returns what runs add to what their stage has, a row for each run."""
        found = np.zeros((len(begins), len(self.limits)))
        for at, (stage, held, most) in enumerate(self.limits):
            if stage != self._runs[number].stage:
                continue
            if held is None:
                seconds = (self._times[ends] - self._times[begins]) / self._speed[stage]
                found[:, at] = (seconds + self._sent[number][begins, ends] * self._link[stage]) / most
            else:
                stashed = held[number] * self._stash[begins, ends]
                found[:, at] = (self._weights[ends] - self._weights[begins] + stashed) / most
        return found

    def _leaves_room(self, number: int, begins: Places, loads: Array) -> _Flags:
        """Returns whether what comes after some places may still find room in the runs from one on.

        Args:
            number: the run.
            begins: the places.
            loads: what stages have by then, a row for each place.
        """
        fits = np.ones(len(begins), bool)
        coming = self._runs[number:]
        for is_timed in (True, False) if coming else ():
            numbers = [at for at, limit in enumerate(self.limits) if (limit.held is None) == is_timed]
            # One limit of each stage: a stage may have several, for moments.
            of_stage = {self.limits[at].stage: at for at in reversed(numbers)}
            chosen = [of_stage.get(run.stage) for run in coming]
            at_each = [at for at in chosen if at is not None]
            if len(at_each) < len(coming):
                continue
            room = np.zeros(len(begins))
            for at in sorted(set(at_each)):
                stage, _, most = self.limits[at]
                room += (_FULL - loads[:, at]) * most * (self._speed[stage] if is_timed else 1.0)
            if is_timed:
                fits &= self._times[-1] - self._times[begins] <= room
                continue
            counts = [(self.limits[at].held or ())[number:][after] for after, at in enumerate(at_each)]
            fits &= self._weights[-1] - self._weights[begins] + min(counts) * self._stash[begins, -1] <= room
        return fits

    def followed(
        self, of_runs: Sequence[Array], left: Sequence[Array], most: float, count: int
    ) -> tuple[Places, float]:
        """Returns paths whose toll is at most so much, and which keep within the limits.

        Args:
            of_runs: the toll of each run.
            left: the least toll of runs from each one on.
            most: what a path may cost.
            count: how many paths are followed at once. The cheapest are.

        Returns:
            A row for each path, with the numbers of its places between runs; and the least toll of a path that was not
            followed, infinite where all were.
        """
        paths, toll = np.zeros((1, 1), np.int64), np.zeros(1)
        loads, left_out = np.zeros((1, len(self.limits))), np.inf
        for number, (costs, after) in enumerate(zip(of_runs, left[1:], strict=True)):
            total = toll[:, None] + costs[paths[:, -1]] + after
            rows, ends = np.nonzero(total <= most)
            # More than are followed, since some exceed a limit.
            kept, left_out = _cheapest(total[rows, ends], ends, 4 * count, left_out)
            rows, ends = rows[kept], ends[kept]
            begins = paths[rows, -1]
            loads = loads[rows] + self._load_of(number, begins, ends)
            fits = (loads <= _FULL).all(axis=1) & self._leaves_room(number + 1, ends, loads)
            rows, begins, ends, loads = rows[fits], begins[fits], ends[fits], loads[fits]
            kept, left_out = _cheapest(total[rows, ends], ends, count, left_out)
            rows, begins, ends, loads = rows[kept], begins[kept], ends[kept], loads[kept]
            paths = np.concatenate([paths[rows], ends[:, None]], axis=1)
            toll = toll[rows] + costs[begins, ends]
        return paths[:, 1:-1], left_out


def _cheapest(tolls: Array, ends: Places, count: int, left_out: float) -> tuple[Places, float]:
    """Returns the numbers of the cheapest paths, and the least toll of those that were left out until now.

    Args:
        tolls: of the paths.
        ends: where they end. Of those that end at a place, only some are among the cheapest.
        count: how many may be kept.
        left_out: the least toll that was left out before.
    """
    if len(tolls) <= count:
        return np.arange(len(tolls)), left_out
    order = np.lexsort((tolls, ends))
    begins = np.flatnonzero(np.diff(ends[order], prepend=-1))
    number = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    few = order[number < max(1, count // _SHARE)]
    few = few[np.argsort(tolls[few], kind="stable")][:count]
    is_left = np.ones(len(tolls), bool)
    is_left[few] = False
    return np.sort(few), min(left_out, float(tolls[is_left].min()))

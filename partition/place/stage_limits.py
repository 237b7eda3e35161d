"""Limits the stages that a unit can be on, given each stage's memory, and says what every placement needs at least.

The units that a unit needs come before it, on the same or an earlier stage, and must fit there. The units that need it
come after it, and must fit there:

    units, by bytes    a 4 ─▶ b 5 ─▶ c 4 ─▶ e 3        no stage has more than 10, there are two:
                              └────▶ d 2 ───┘
    first stage        a 0    b 0    c 1    e 1         before c there are a and b, with it 13
                                     d 1                and before d as well: 11
    last stage         a 0    b 0    c 1    e 1         after b there are c, d and e, with it 14

Where a unit finds no stage, no placement is that small. The largest limit for which this is known is a lower bound for
all placements, proved without a search. A solver that searches has less to decide.

Source:
    Earliest and latest stations of assembly lines: Scholl and Becker, "State-of-the-art exact and heuristic solution
    procedures for simple assembly line balancing" (European Journal of Operational Research 168, 2006);
    here with loads that depend on the stage, and what several units share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.place.placement import Chain, Ranks

#: The most units whose needs are held as a table of all pairs.
MOST_UNITS = 3000
#: How often the distance to the best bound is halved.
_STEPS = 8
#: The factor for rounding errors of sums, so that they do not make a unit too large.
_SLACK = 1e-9
#: How many rows of the table are computed together.
_ROWS = 128

_Flags = NDArray[np.bool_]
_Stages = NDArray[np.int64]


@dataclass(frozen=True)
class _Load:
    """What units add to a stage: each its own, and sets of units something once if at least one of them is there.

    Args:
        alone: load of each unit, per stage.
        together: load of each set, per stage.
        members: of all sets, one set after the other.
        begins: where each set begins in `members`.
        most: the limit of each stage, or None for the limit that is asked about.
    """

    alone: NDArray[np.float64]
    together: NDArray[np.float64]
    members: _Stages
    begins: _Stages
    most: Sequence[float | None]

    def fit(self, stage: int, units: _Flags, limit: float | None) -> _Flags:
        """Returns whether sets of units, one per row, each fit on a stage alone."""
        given = [most for most in (self.most[stage], limit) if most is not None]
        if not given:
            return np.ones(len(units), bool)
        brought = units @ self.alone[stage]
        if len(self.begins):
            some = np.logical_or.reduceat(units[:, self.members], self.begins, axis=1)
            brought = brought + some @ self.together[stage]
        return np.asarray(brought <= min(given) * (1 + _SLACK))


class StageLimits:
    """On which stages units can be.

    Args:
        chain: the units in topological order, with their costs.
        needs: pairs of units. The second one needs something of the first.
        in_flight: microbatches whose stash each stage holds.
        ranks: how these differ, and the bytes that they may need.
        objective: what is limited: "memory", the bytes of a stage, or "speed", its seconds of compute.

    Example:
        >>> chain = Chain(("a", "b", "c"), (4.0, 5.0, 4.0))
        >>> limits = StageLimits(chain, [(0, 1), (1, 2)], (1, 1), Ranks.alike(2), "speed")
        >>> limits.within(9.0)
        ([0, 0, 1], [0, 0, 1])
        >>> limits.within(8.0) is None
        True
    """

    def __init__(
        self,
        chain: Chain,
        needs: Iterable[tuple[int, int]],
        in_flight: Sequence[int],
        ranks: Ranks,
        objective: str,
    ) -> None:
        self._stages = len(in_flight)
        self._is_speed = objective == "speed"
        self._before = _closure(len(chain.names), needs)
        # The same from the other end, where the last unit is the first.
        self._behind = np.ascontiguousarray(self._before.T[::-1, ::-1])
        held = _held(chain, in_flight, ranks.memory)
        self._loads = [_computed(chain, ranks.speed), held] if self._is_speed else [held]

    def within(self, limit: float) -> tuple[list[int], list[int]] | None:
        """Returns the first and the last stage of every unit in any placement that keeps within a limit.

        Args:
            limit: bytes, or seconds of compute.

        Returns:
            The two lists; None where there is no such placement.
        """
        forwards = list(range(self._stages))
        first: _Stages = np.zeros(len(self._before), np.int64)
        last = first + self._stages - 1
        # Stages that one end rules out make the search from the other end shorter.
        for _ in range(2):
            found = self._earliest(self._before, forwards, self._stages - 1 - last, limit)
            if found is None:
                return None
            first = found
            # From the other end units and stages are counted backwards.
            found = self._earliest(self._behind, forwards[::-1], first[::-1], limit)
            if found is None:
                return None
            last = self._stages - 1 - found[::-1]
            if (first > last).any():
                return None
        return first.tolist(), last.tolist()

    def least(self, low: float, high: float, worth: float) -> float:
        """Returns a lower bound for the fullest stage of any placement.

        Args:
            low: a lower bound that is known.
            high: what the fullest stage of a placement has.
            worth: a bound that is nearer to `high` than this is near enough.
        """
        if self._is_too_little(high - worth):
            return high - worth
        for _ in range(_STEPS):
            if high - low <= worth:
                break
            middle = (low + high) / 2
            if self._is_too_little(middle):
                low = middle
            else:
                high = middle
        return low

    def _is_too_little(self, limit: float) -> bool:
        return self.within(limit) is None

    def _earliest(self, before: _Flags, stages: Sequence[int], from_end: _Stages, limit: float) -> _Stages | None:
        """Returns, for every unit, how many stages come before the first stage that it can be on.

        Args:
            before: for each unit, itself and all that must come before it, which have smaller numbers.
            stages: the stages in the order in which they are filled. Where it is backwards, so are the units.
            from_end: for each unit, how many stages come after the last stage that it can be on.
            limit: what each stage may have.
        """
        count, backwards = len(before), stages[0] > stages[-1]
        found: _Stages = np.full(count, len(stages), np.int64)
        for at, stage in enumerate(stages):
            left = found == len(stages)
            # Units that can be neither on an earlier stage nor on a later one.
            surely = left & (len(stages) - 1 - from_end <= at)
            too_much = np.zeros(count, bool)
            rows = np.flatnonzero(left)
            for block in (rows[begin : begin + _ROWS] for begin in range(0, len(rows), _ROWS)):
                # Where a unit's predecessor does not fit, neither does the unit.
                open_rows = block[~(before[block] & too_much).any(axis=1)]
                units = (before[open_rows] & left) | surely
                fits = np.ones(len(open_rows), bool)
                for load, most in zip(self._loads, (limit, None), strict=False):
                    fits &= load.fit(stage, units[:, ::-1] if backwards else units, most)
                found[open_rows[fits]] = at
                too_much[open_rows[~fits]] = True
        return None if (found == len(stages)).any() else found


def _closure(count: int, needs: Iterable[tuple[int, int]]) -> _Flags:
    """Returns, for every unit, itself and all units that it needs, directly or not."""
    direct: list[list[int]] = [[] for _ in range(count)]
    for before, after in needs:
        direct[after].append(before)
    found: _Flags = np.eye(count, dtype=bool)
    for unit in range(count):
        for before in direct[unit]:
            found[unit] |= found[before]
    return found


def _computed(chain: Chain, speed: Sequence[float]) -> _Load:
    times = np.asarray(chain.times)
    alone = np.stack([times / one for one in speed])
    none: Any = np.zeros(0, np.int64)
    return _Load(alone, np.zeros((len(speed), 0)), none, none, [None] * len(speed))


def _held(chain: Chain, in_flight: Sequence[int], memory: Sequence[float | None]) -> _Load:
    """Returns the loads of weights and stashes. A weight of several units counts at least the copy on each stage."""
    weights: dict[tuple[int, ...], float] = {}
    stashes: dict[tuple[int, ...], float] = {}
    for weight in chain.weights:
        users = tuple(sorted(set(weight.users)))
        weights[users] = weights.get(users, 0.0) + (weight.stored if len(users) == 1 else weight.copied)
    for stash in chain.stashes:
        readers = tuple(sorted(set(stash.readers)))
        stashes[readers] = stashes.get(readers, 0.0) + stash.nbytes
    alone = np.zeros((len(in_flight), len(chain.names)))
    sets = sorted(users for users in {*weights, *stashes} if len(users) > 1)
    together = np.zeros((len(in_flight), len(sets)))
    for stage, held in enumerate(in_flight):
        for users in {*weights, *stashes}:
            if len(users) == 1:
                alone[stage, users[0]] = weights.get(users, 0.0) + held * stashes.get(users, 0.0)
        together[stage] = [weights.get(users, 0.0) + held * stashes.get(users, 0.0) for users in sets]
    members = np.asarray([unit for users in sets for unit in users], np.int64)
    begins = np.cumsum([0, *map(len, sets)])[:-1]
    return _Load(alone, together, members, begins, memory)

"""Finds cuts between chunks where each stage has up to two, by dynamic programming over some places for cuts.

    in a V     [─0─]▶ [1]▶ ◀[──2──] ◀[─3─]      stages (0, 1, 1, 0): what is left lies between two fronts, which meet
    in turn    [─0─]▶ [1]▶  [──2──]▶ [─3─]▶     stages (0, 1, 0, 1): two fronts, the second from a given place on

Stages are filled one after the other. Each takes a run from one front and a run from the other. So a state is where
both fronts are, and the load of the stage that is filled next depends on nothing else. Of n units there are too many
such states. Hence only some places count: those where little passes, one in each piece of the model that has an equal
load. Then others near the cuts that were found count.

Costs are those of runs, added up. A shared weight counts once on a stage. A tensor that goes far is sent once to each
stage, and not to the one that makes it. What is found is costed exactly by who asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.place.chunk_search import shared_of
from smp_tf.partition.place.placement import Chain, Chunks, Ranks
from smp_tf.partition.place.run_costs import Array, RunCosts, far_tensors
from smp_tf.partition.place.solve_chain import earliest_starts

Cuts = tuple[int, ...]
_Places = NDArray[np.int64]
_Flags = NDArray[np.bool_]
#: How many places for cuts are looked at together.
MOST_PLACES = 56
#: How many places for the begin of the second front are tried, where it has one, for even cuts and for few bytes; all,
#: where there are so few places.
_MIDDLES, _FEWER_MIDDLES, _FEW = 7, 4, 36


@dataclass(frozen=True)
class Level:
    """The chunks of a stage that is filled.

    Args:
        stage: the stage.
        first: its chunk at the first front.
        second: its chunk at the second front; None where it has none.
    """

    stage: int
    first: int
    second: int | None


@dataclass(frozen=True)
class Fronts:
    """The order in which stages are filled from two fronts.

    Args:
        levels: the stages in this order.
        meet: whether the fronts go towards each other. Otherwise both go towards the end.
    """

    levels: tuple[Level, ...]
    meet: bool

    @classmethod
    def of(cls, placement: Sequence[int]) -> Fronts | None:
        """Returns the order for chunks; None where there is none.

        Args:
            placement: the stage of every chunk.

        Example:
            >>> [(level.stage, level.second) for level in Fronts.of((0, 1, 2, 0)).levels]
            [(0, 3), (1, None), (2, None)]
        """
        count = len(placement)
        half = count // 2
        if count > 2 and count % 2 == 0 and tuple(placement) == (*placement[:half], *placement[:half]):
            if len(set(placement)) == half:
                return cls(tuple(Level(placement[at], at, half + at) for at in range(half)), False)
            return None
        levels, first, last = [], 0, count - 1
        while first <= last:
            if first < last and placement[first] == placement[last]:
                levels.append(Level(placement[first], first, last))
                last -= 1
            else:
                levels.append(Level(placement[first], first, None))
            first += 1
        stages = [level.stage for level in levels]
        return cls(tuple(levels), True) if len(set(stages)) == len(stages) else None


@dataclass(frozen=True)
class _Taken:
    """What stages cost, by the places of the fronts before and after they are filled.

    Args:
        load: what is balanced, for each place of the first front after it, and of the second front after and before it.
        sent: returns the bytes that the stage receives, in the same way.
    """

    load: Array
    sent: Callable[[], Array]


class FrontSearch:
    """Finds cuts between chunks.

    Args:
        chain: the units with their costs.
        chunks: where the chunks are, and what they keep. There are `Fronts` of them.
        objective: "memory" or "speed".
        microbatches: per step.
        ranks: how these differ.
    """

    def __init__(self, chain: Chain, chunks: Chunks, objective: str, microbatches: int, ranks: Ranks) -> None:
        fronts = Fronts.of(chunks.placement)
        assert fronts is not None, f"chunks on stages {chunks.placement} are not filled from two fronts"
        self._costs = RunCosts.of(chain, frozenset(), microbatches)
        self._chunks, self._objective, self._ranks, self._fronts = chunks, objective, ranks, fronts
        self._starts = earliest_starts(chain, chunks.placement)
        self._far = far_tensors(chain, microbatches, len(chunks.placement))
        #: By the places, what runs between these receive and make of such tensors.
        self._far_tables: dict[bytes, tuple[_Flags, _Flags]] = {}
        self._shared = shared_of(chain)

    def most_even(self, like: Cuts) -> list[Cuts]:
        """Returns cuts whose fullest, or slowest, stage has little, the best last.

        Args:
            like: cuts that are known. A second front that begins somewhere begins near theirs.
        """
        return self._nearer(like, lambda before, taken: np.maximum(before, taken.load), _MIDDLES)

    def sends_least(self, most: float, like: Cuts, known: float = math.inf) -> list[Cuts]:
        """Returns cuts that send few bytes, the best last; none where none is found within the limits.

        Args:
            most: what each stage may have of what is balanced.
            like: cuts that are known, within the limit.
            known: the bytes per step that are sent at most.
        """
        # A shared weight may count for each run.
        known += sum(shared.crossing for shared in self._shared) * len(self._chunks.placement)

        def sent(before: Array, taken: _Taken) -> Array:
            nbytes = before + taken.sent()
            return np.where((taken.load <= most) & (nbytes <= known), nbytes, math.inf)

        return self._nearer(like, sent, _FEWER_MIDDLES)

    def _nearer(self, like: Cuts, value: Callable[[Array, _Taken], Array], middles: int) -> list[Cuts]:
        """Returns the best cuts at places all over the model, then the best ones near these, or near known ones."""
        places = self._places()
        found = [cuts for cuts in [self._best(places, like, value, middles, all_over=True)] if cuts is not None]
        near, are_all = (found or [like])[0], len(places) == self._costs.count - 1
        if are_all and (self._fronts.meet or len(places) <= _FEW):
            return found
        nearest = self._best(places if are_all else self._near(near), near, value, middles)
        return [*found, nearest] if nearest is not None else found

    def _places(self) -> _Places:
        """Returns places for cuts: in each piece of an equal load the one where least passes."""
        costs = self._costs
        if costs.count <= MOST_PLACES:
            return np.arange(1, costs.count)
        units = np.arange(costs.count)
        table = costs.compute if self._objective == "speed" else costs.weights + costs.stash
        alone = table[units, units + 1]
        piece = np.minimum(np.cumsum(alone) / (alone.sum() or 1.0) * MOST_PLACES, MOST_PLACES - 1).astype(int)
        found: dict[int, tuple[float, int]] = {}
        passes = costs.sent[0, 1:-1] + costs.sent[1:-1, costs.count]
        for at, nbytes in enumerate(passes):
            if piece[at] not in found or nbytes < found[piece[at]][0]:
                found[piece[at]] = nbytes, at + 1
        return np.asarray(sorted(at for _, at in found.values()))

    def _near(self, cuts: Cuts) -> _Places:
        """Returns places near some cuts."""
        far = max(1, (MOST_PLACES // len(cuts) - 1) // 2)
        near = {cut + by for cut in cuts for by in range(-far, far + 1)}
        return np.asarray(sorted(at for at in near if 0 < at < self._costs.count))

    def _best(
        self,
        places: _Places,
        like: Cuts,
        value: Callable[[Array, _Taken], Array],
        middles: int,
        *,
        all_over: bool = False,
    ) -> Cuts | None:
        """Returns the cuts with the least value, by the value before a stage is filled and what it takes."""
        grid = np.unique(np.concatenate([[0], places, [self._costs.count]]))
        best: tuple[float, Cuts] | None = None
        for begin, end in self._ends(grid, like, middles, all_over=all_over):
            reached = np.full((len(grid), len(grid)), math.inf)
            reached[begin] = 0.0
            ways = []
            for number, level in enumerate(self._fronts.levels):
                reached, way = self._filled(grid, number, level, reached, value, end)
                ways.append(way)
            found = float(reached.min())
            if math.isfinite(found) and (best is None or found < best[0]):
                best = found, self._cuts(grid, ways, reached)
        return best[1] if best is not None else None

    def _ends(
        self, grid: _Places, like: Cuts, middles: int, *, all_over: bool
    ) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yields where both fronts begin and end. Fronts that meet end anywhere, which is (-1, -1).

        Args:
            grid: all places.
            like: cuts that are known.
            middles: how many places for the begin of the second front are tried, where there are many.
            all_over: whether they are spread all over the model. Otherwise they are next to that of the known cuts.
        """
        last = len(grid) - 1
        if self._fronts.meet:
            yield (0, last), (-1, -1)
            return
        half = len(self._fronts.levels)
        at = int(np.argmin(np.abs(grid - like[half - 1])))
        step = max(1, last // middles) if all_over and last > _FEW else 1
        possible = [begin for begin in range(half, last - half + 1) if (begin - at) % step == 0]
        for begin in sorted(possible, key=lambda other: abs(other - at))[: middles if last > _FEW else last]:
            yield (0, begin), (begin, last)

    def _filled(
        self,
        grid: _Places,
        number: int,
        level: Level,
        reached: Array,
        value: Callable[[Array, _Taken], Array],
        end: tuple[int, int],
    ) -> tuple[Array, tuple[_Places, _Places]]:
        """Returns the least values once a stage is filled, by the places of both fronts, and where each was before."""
        count = len(grid)
        found = np.full((count, count), math.inf)
        first, second = (np.zeros((count, count), np.int64) for _ in range(2))
        last = number == len(self._fronts.levels) - 1
        for begin in np.flatnonzero(np.isfinite(reached).any(axis=1)):
            befores = np.flatnonzero(np.isfinite(reached[begin]))
            afters = np.arange(begin + 1, count)
            taken, legal = self._taken(grid, level, int(begin), afters, befores, last=last)
            values = np.where(legal, value(reached[begin, befores], taken), math.inf)
            if not self._fronts.meet:
                values[afters > end[0]] = math.inf
                if last:
                    values[afters != end[0]] = math.inf
                    values[:, np.arange(count) != end[1]] = math.inf
            at = values.argmin(axis=2)
            least = np.take_along_axis(values, at[:, :, None], axis=2)[:, :, 0]
            better = least < found[afters]
            found[afters] = np.where(better, least, found[afters])
            first[afters] = np.where(better, begin, first[afters])
            second[afters] = np.where(better, befores[at], second[afters])
        return found, (first, second)

    def _taken(
        self, grid: _Places, level: Level, begin: int, afters: _Places, befores: _Places, *, last: bool
    ) -> tuple[_Taken, _Flags]:
        """Returns what a stage takes from a place of the first front on, and which of it is legal.

        Args:
            grid: all places.
            level: the chunks of the stage.
            begin: number of the place of the first front before.
            afters: numbers of the places of the first front after it.
            befores: numbers of the places of the second front before.
            last: whether it is the last stage.
        """
        ones = grid[[begin]], grid[afters]
        pairs = (grid[:, None], grid[befores]) if self._fronts.meet else (grid[befores], grid[:, None])
        shape = len(afters), len(grid), len(befores)
        legal = np.broadcast_to((ones[0] >= self._starts[level.first][ones[1]])[:, None, None], shape)
        if level.second is None:
            stays = np.arange(len(grid))[:, None] == befores
            legal = legal & stays
        else:
            legal = legal & ((pairs[0] < pairs[1]) & (pairs[0] >= self._starts[level.second][pairs[1]]))
        if self._fronts.meet:
            left = np.arange(len(grid)) == afters[:, None] if last else np.arange(len(grid)) > afters[:, None]
            legal = legal & left[:, :, None]
        alone = level.second is None

        def of(table: Array) -> tuple[Array, Array]:
            return table[ones][:, None, None], np.zeros((1, 1)) if alone else table[pairs]

        costs = self._costs
        # The last chunks of fronts that meet are one run.
        whole = (grid[[begin]], grid[befores]) if last and not alone and self._fronts.meet else None

        def sent() -> Array:
            if whole is not None:
                return np.broadcast_to(costs.sent[whole], shape)
            return np.add(*of(costs.sent)) - (0.0 if alone else self._sent_twice(grid, begin, afters, befores))

        if self._objective == "speed":
            ranks = self._ranks
            moved = np.add(*of(costs.moved)) if whole is None else np.broadcast_to(costs.moved[whole], shape)
            load = np.add(*of(costs.compute)) / ranks.speed[level.stage] + moved / ranks.link[level.stage]
            return _Taken(load, sent), legal
        stashes = of(costs.stash)
        stashed = np.zeros(shape)
        for held in self._chunks.moments[level.stage]:
            kept = held.get(level.first, 0), 0 if level.second is None else held.get(level.second, 0)
            stashed = np.maximum(stashed, kept[0] * stashes[0] + kept[1] * stashes[1])
        load = np.add(*of(costs.weights)) + stashed
        for shared in self._shared if not alone else ():
            load = load - shared.copied * (_uses(ones, shared.users)[:, None, None] & _uses(pairs, shared.users))
        return _Taken(load, sent), legal

    def _sent_twice(self, grid: _Places, begin: int, afters: _Places, befores: _Places) -> Array | float:
        """Returns the bytes that both runs of a stage receive, or that one receives and the other one makes.

        Args:
            grid: all places.
            begin: number of the place of the first front before.
            afters: numbers of the places of the first front after it.
            befores: numbers of the places of the second front before.
        """
        if not self._far:
            return 0.0
        receives, makes = (table[begin, afters] for table in self._far_on(grid))
        receives_too, makes_too = (
            table[:, befores] if self._fronts.meet else table[befores].swapaxes(0, 1) for table in self._far_on(grid)
        )
        nbytes = np.asarray(list(self._far.values()))
        twice = (receives * nbytes) @ (receives_too | makes_too).reshape(-1, len(nbytes)).T
        twice += (makes * nbytes) @ receives_too.reshape(-1, len(nbytes)).T
        return np.asarray(twice.reshape(len(afters), len(grid), len(befores)))

    def _far_on(self, grid: _Places) -> tuple[_Flags, _Flags]:
        """Returns which tensors that go far runs between places receive, and which they make, along the last axis."""
        at = grid.tobytes()
        if at not in self._far_tables:
            runs = grid[:, None], grid
            makes = np.stack([_uses(runs, (producer,)) for producer, _ in self._far], axis=-1)
            reads = np.stack([_uses(runs, users) for _, users in self._far], axis=-1)
            self._far_tables[at] = reads & ~makes, makes
        return self._far_tables[at]

    def _cuts(self, grid: _Places, ways: Sequence[tuple[_Places, _Places]], reached: Array) -> Cuts:
        """Returns the cuts of the best way."""
        at = divmod(int(reached.argmin()), len(grid))
        bounds: dict[int, int] = {}
        for level, (first, second) in zip(self._fronts.levels[::-1], ways[::-1], strict=True):
            before = int(first[at]), int(second[at])
            bounds[level.first] = int(grid[before[0]])
            if level.second is not None:
                bounds[level.second] = int(grid[at[1] if self._fronts.meet else before[1]])
            at = before
        return tuple(bounds[chunk] for chunk in range(1, len(self._chunks.placement)))


def _uses(runs: tuple[_Places, _Places], users: Sequence[int]) -> _Flags:
    """Returns whether runs hold any of some units."""
    begins, ends = runs
    some = np.zeros(np.broadcast(begins, ends).shape, bool)
    for user in users:
        some |= (begins <= user) & (user < ends)
    return some

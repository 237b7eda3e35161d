"""Moves the cuts between chunks, so that stages that have several are balanced and send few bytes.

    units    u0 u1 u2 u3 u4 u5 u6 u7
    chunks   [─0─] [──1──] [2] [─3─]        placement (0, 1, 1, 0): stage 0 has u0 u1 u6 u7, stage 1 the others
                  ▲        ▲                each pair of cuts is tried at the places near by where little passes

The cost of a stage is no cost of one run, so no dynamic program finds the best cuts. This search prices a balance that
is too bad, first little and then more and more, so that cuts stay where little passes for as long as they can. It
proves nothing. Costs are those of runs, added up, and shared weights count once for each stage. The first or the last
user of a shared weight owns it, whichever leaves more room. Tensors that go far are sent once to each stage, and not to
the one that makes them. What is found is costed exactly by who asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.place.placement import Chain, Chunks, Ranks
from smp_tf.partition.place.run_costs import Array, RunCosts, far_tensors
from smp_tf.partition.place.solve_chain import earliest_starts
from smp_tf.partition.units.cost import Weight

Cuts = tuple[int, ...]
_Places = NDArray[np.int64]

#: What a stage that has twice of what it may have costs, as a multiple of the bytes that the first cuts send.
_PRICES = (1.0, 4.0, 16.0, 64.0, 256.0)
#: What a step that is twice as long costs in the same way: so little that it only decides between equal cuts.
_STEP = 1e-6
#: How often all pairs of cuts are tried for each price.
_SWEEPS = 6
#: How many places on each side of a cut are tried: the next ones, and those where little passes.
_NEXT, _LOW = 2, 4
#: How many cuts apart two are that are moved together.
_APART = 3
#: From how many cuts a search begins.
_MOST_STARTS = 2
#: The most cuts that are tried from one start, the same on every machine.
_MOST_LOOKS = 150_000


@dataclass(frozen=True)
class Looked:
    """What some cuts cost.

    Args:
        load: what is balanced, for each cut and stage.
        sent: bytes sent per step, for each cut.
        step: seconds of a step, for each cut.
        over: by how much each cut exceeds the memory of ranks; infinity where it contradicts what is given.
        late: for each shared weight, by the order of its users, and each cut whether its last user owns it.
    """

    load: Array
    sent: Array
    step: Array
    over: Array
    late: Sequence[NDArray[np.bool_]]


@dataclass(frozen=True)
class SharedWeights:
    """Weights that the same units use.

    Args:
        users: the units.
        variables: the numbers of the weights.
        copied: bytes on each stage that uses them.
        owned: bytes more on the stage that owns them.
        crossing: bytes that cross per step between the owner and another stage.
        moved: the same with the bytes that take as long as the messages themselves.
    """

    users: tuple[int, ...]
    variables: tuple[int, ...]
    copied: float
    owned: float
    crossing: float
    moved: float


class ChunkSearch:
    """Finds cuts between chunks.

    Args:
        chain: the units with their costs.
        chunks: where the chunks are, and what they keep.
        objective: "memory" or "speed".
        microbatches: per step.
        ranks: how these differ, and what they may need.
    """

    def __init__(
        self,
        chain: Chain,
        chunks: Chunks,
        objective: str,
        microbatches: int,
        ranks: Ranks,
    ) -> None:
        self._costs = RunCosts.of(chain, frozenset(), microbatches)
        self._chunks, self._objective, self._microbatches, self._ranks = chunks, objective, microbatches, ranks
        self._starts = earliest_starts(chain, chunks.placement)
        self._seconds = chain.seconds_per_byte / microbatches
        self._limits = np.asarray([math.inf if limit is None else limit for limit in ranks.memory])
        self._shared = shared_of(chain)
        self._far = far_tensors(chain, microbatches, len(chunks.placement))
        most = max((len(users) for _, users in self._far), default=0)
        #: For each tensor that goes far the unit that makes it, then those that read it, the last one repeated.
        self._far_ends = np.asarray([(at, *users, *users[-1:] * (most - len(users))) for at, users in self._far])
        self._far_bytes = np.asarray(list(self._far.values()))
        #: For each number of readers, the units that make and that read tensors, and their bytes per step.
        self._moved_by_readers = _by_readers(chain, microbatches)
        #: The first and the last chunk of each run of chunks on one stage.
        self._joined = list(_joined(chunks.placement))
        self._low = _low_places(self._costs, len(chunks.placement))

    def look(self, cuts: _Places) -> Looked:
        """Returns what cuts cost.

        Args:
            cuts: a row for each, with the first unit of chunk 1, of chunk 2 and so on.
        """
        costs, chunks, ranks = self._costs, self._chunks, self._ranks
        count = len(cuts)
        ends = np.full((count, 1), costs.count, np.int64)
        bounds = np.concatenate([np.zeros((count, 1), np.int64), cuts, ends], axis=1)
        legal = np.asarray((np.diff(bounds, axis=1) > 0).all(axis=1))
        # Runs that are none are looked up as some that are.
        bounds = np.where(legal[:, None], bounds, np.minimum(np.arange(bounds.shape[1]), costs.count))
        stashed, compute, weights, moved = (np.zeros((count, chunks.stages)) for _ in range(4))
        stash = np.empty((count, len(chunks.placement)))
        for chunk, stage in enumerate(chunks.placement):
            run = bounds[:, chunk], bounds[:, chunk + 1]
            legal &= run[0] >= self._starts[chunk][run[1]]
            compute[:, stage] += costs.compute[run]
            weights[:, stage] += costs.weights[run]
            stash[:, chunk] = costs.stash[run]
        sent = np.zeros(count)
        for first, last in self._joined:
            run = bounds[:, first], bounds[:, last + 1]
            moved[:, chunks.placement[first]] += costs.moved[run]
            sent += costs.sent[run]
        for stage, moments in enumerate(chunks.moments):
            for held in moments:
                at_once = sum((kept * stash[:, chunk] for chunk, kept in held.items()), np.zeros(count))
                stashed[:, stage] = np.maximum(stashed[:, stage], at_once)
        for shared in self._shared:
            twice, sent_twice, moved_twice = self._counted_twice(cuts, np.asarray(shared.users))
            weights -= shared.copied * twice
            sent -= shared.crossing * sent_twice
            moved -= shared.moved * self._seconds * moved_twice
        memory = weights + stashed
        sent -= self._sent_twice(cuts)
        late = self._give_owners(cuts, memory)
        time = compute / np.asarray(ranks.speed) + moved / np.asarray(ranks.link)
        slowest = time.max(axis=1)
        step = self._microbatches * slowest + (time.sum(axis=1) - slowest) / chunks.per_stage
        over = np.where(legal, np.maximum(memory - self._limits, 0.0).max(axis=1), math.inf)
        return Looked(memory if self._objective == "memory" else time, sent, step, over, late)

    def sent(self, cuts: _Places) -> Array:
        """Returns the bytes per step that cuts send, each tensor counted exactly.

        Args:
            cuts: a row for each, with the first unit of chunk 1, of chunk 2 and so on.
        """
        units, stages = np.arange(self._costs.count), np.arange(self._chunks.stages)
        stage_of = np.asarray(self._chunks.placement)[(cuts[:, :, None] <= units).sum(axis=1)]
        found = np.zeros(len(cuts))
        for ends, nbytes in self._moved_by_readers:
            makes, reads = stage_of[:, ends[:, :1]], stage_of[:, ends[:, 1:]]
            if reads.shape[2] == 1:
                found += (reads != makes)[:, :, 0] @ nbytes
            else:
                found += sum(((reads == at).any(axis=2) & (makes[:, :, 0] != at)) @ nbytes for at in stages)
        return found

    def late(self, cuts: Cuts) -> frozenset[int]:
        """Returns the shared variables that their last user owns.

        Args:
            cuts: the first unit of chunk 1, of chunk 2 and so on.
        """
        looked = self.look(np.asarray([cuts], np.int64))
        return frozenset(
            variable
            for shared, late in zip(self._shared, looked.late, strict=True)
            for variable in (shared.variables if late[0] else ())
        )

    def _give_owners(self, cuts: _Places, memory: Array) -> list[NDArray[np.bool_]]:
        """Gives each shared weight to the stage of its first or of its last user, whichever has more room.

        Args:
            cuts: a row for each.
            memory: for each row what stages have, where the stage of the first user owns each weight. It is changed.

        Returns:
            For each shared weight and row whether the last user has it.
        """
        rows, placement = np.arange(len(cuts)), np.asarray(self._chunks.placement)
        room = self._limits if len(set(self._ranks.memory)) > 1 else np.zeros(len(self._limits))
        given = []
        for shared in self._shared:
            first, last = (placement[(cuts <= user).sum(axis=1)] for user in (shared.users[0], shared.users[-1]))
            memory[rows, first] -= shared.owned
            late = memory[rows, last] - room[last] < memory[rows, first] - room[first]
            memory[rows, np.where(late, last, first)] += shared.owned
            given.append(late)
        return given

    def _sent_twice(self, cuts: _Places) -> Array:
        """Returns, for each cut, the bytes of tensors that go far and that costs of runs count too often.

        Args:
            cuts: a row for each.
        """
        if not self._far:
            return np.zeros(len(cuts))
        stage_of = np.asarray([self._chunks.placement[first] for first, _ in self._joined])
        run_of = np.repeat(np.arange(len(self._joined)), [last - first + 1 for first, last in self._joined])
        ends = run_of[(cuts[:, :, None] <= self._far_ends.ravel()).sum(axis=1)].reshape(
            len(cuts), *self._far_ends.shape
        )
        makes, reads = ends[:, :, :1], ends[:, :, 1:]
        runs, stages = np.arange(len(self._joined)), np.arange(self._chunks.stages)
        in_runs = (reads[:, :, :, None] == runs).any(axis=2) & (makes != runs)
        in_stages = (stage_of[reads][:, :, :, None] == stages).any(axis=2) & (stage_of[makes] != stages)
        return np.asarray((in_runs.sum(axis=2) - in_stages.sum(axis=2)) @ self._far_bytes)

    def _counted_twice(self, cuts: _Places, users: _Places) -> tuple[Array, Array, Array]:
        """Returns how often costs of runs count a weight of several units too often.

        Args:
            cuts: a row for each.
            users: the units that use the weight.

        Returns:
            For each cut and stage, copies too many; for each cut, times too often that it is sent; and for each cut and
            stage, times too often that it crosses the border.
        """
        placement = np.asarray(self._chunks.placement)
        chunk_of = (cuts[:, :, None] <= users).sum(axis=1)
        uses = (chunk_of[:, :, None] == np.arange(len(placement))).any(axis=1)
        run_uses = np.stack([uses[:, first : last + 1].any(axis=1) for first, last in self._joined], axis=1)
        chunks_of = np.stack([uses[:, placement == at].sum(axis=1) for at in range(self._chunks.stages)], axis=1)
        stage_of = placement[[first for first, _ in self._joined]]
        runs_of = np.stack([run_uses[:, stage_of == at].sum(axis=1) for at in range(self._chunks.stages)], axis=1)
        runs, stages = run_uses.sum(axis=1), (runs_of > 0).sum(axis=1)
        crosses = np.where(runs[:, None] > 1, runs_of, 0) - np.where(stages[:, None] > 1, runs_of > 0, 0)
        return np.maximum(chunks_of - 1, 0).astype(float), (runs - stages).astype(float), crosses.astype(float)

    def more_even(self, starts: Sequence[Cuts]) -> Cuts:
        """Returns cuts whose fullest, or slowest, stage has less.

        Args:
            starts: cuts to begin with. The search goes on from the best of these.
        """

        def worst(_: _Places, looked: Looked) -> Array:
            return np.where(looked.over > 0, math.inf, looked.load.max(axis=1))

        tried = np.asarray(starts, np.int64)
        return self._improved(starts[int(worst(tried, self.look(tried)).argmin())], worst)

    def sends_less(self, starts: Sequence[Cuts], most: float, longest: float, known: Cuts) -> Cuts:
        """Returns the cuts that send the fewest bytes of those that are found, then have the shortest step.

        Args:
            starts: cuts to begin with.
            most: what each stage may have of what is balanced.
            longest: seconds that a step may take.
            known: cuts that keep within these.
        """
        first = self.look(np.asarray([known]))
        best = (float(first.sent[0]), float(first.step[0])), known
        tried = np.asarray(starts, np.int64)
        looked = self.look(tried)
        over = np.maximum(looked.load / most - 1, 0.0).sum(axis=1) + np.maximum(looked.step / longest - 1, 0.0)
        order = np.argsort(looked.sent / (best[0][0] or 1.0) + 16 * over, kind="stable")[:_MOST_STARTS]
        starts = [starts[at] for at in order]
        scale, seconds = best[0][0] or 1.0, best[0][1] or 1.0
        for start in starts:
            cuts = start
            for price in _PRICES:

                def priced(tried: _Places, looked: Looked, price: float = price) -> Array:
                    nonlocal best
                    excess = np.maximum(looked.load / most - 1, 0.0).sum(axis=1)
                    excess += np.maximum(looked.step / longest - 1, 0.0)
                    fits = np.flatnonzero((excess <= 0) & (looked.over <= 0))
                    if len(fits):
                        at = fits[np.lexsort((looked.step[fits], looked.sent[fits]))[0]]
                        order = float(looked.sent[at]), float(looked.step[at])
                        if order < best[0]:
                            best = order, tuple(map(int, tried[at]))
                    value = looked.sent / scale + price * excess + _STEP * looked.step / seconds
                    return np.where(looked.over > 0, math.inf, value)

                cuts = self._improved(cuts, priced)
        return best[1]

    def _improved(self, cuts: Cuts, value: Callable[[_Places, Looked], Array]) -> Cuts:
        """Returns the cuts that moving pairs leads to, as long as a value falls."""
        looks = 0
        for _ in range(_SWEEPS):
            before = cuts
            for pair in _pairs(len(cuts)):
                tried = self._moved(cuts, pair)
                looks += len(tried)
                found = value(tried, self.look(tried))
                at = int(found.argmin())
                # The first row is the cuts themselves.
                if found[at] < found[0] - 1e-12 * abs(found[0]):
                    cuts = tuple(map(int, tried[at]))
            if cuts == before or looks > _MOST_LOOKS:
                break
        return cuts

    def _moved(self, cuts: Cuts, pair: tuple[int, ...]) -> _Places:
        """Returns the cuts, then those with one or two of them at other places."""
        places = [self._places(cuts[at]) for at in pair]
        grid = np.stack([axis.ravel() for axis in np.meshgrid(*places, indexing="ij")], axis=1)
        moved = np.tile(np.asarray(cuts, np.int64), (len(grid) + 1, 1))
        moved[1:, list(pair)] = grid
        return moved

    def _places(self, at: int) -> _Places:
        """Returns places near a cut: the next ones, and those where little passes."""
        near = {at + by for by in range(-_NEXT, _NEXT + 1)}
        for places in self._low:
            middle = int(np.searchsorted(places, at))
            near.update(map(int, places[max(0, middle - _LOW) : middle + _LOW + 1]))
        return np.asarray(sorted(place for place in near if 0 < place < self._costs.count), np.int64)


def shared_of(chain: Chain) -> list[SharedWeights]:
    """Returns the weights that several units use, those with the same users together."""
    found: dict[tuple[int, ...], list[Weight]] = {}
    for weight in chain.weights:
        if len(weight.users) > 1:
            found.setdefault(weight.users, []).append(weight)
    return [
        SharedWeights(
            users,
            tuple(weight.variable for weight in weights),
            sum(weight.copied for weight in weights),
            sum(weight.stored - weight.copied for weight in weights),
            sum(weight.crossing for weight in weights),
            sum(chain.bytes_across(weight) for weight in weights),
        )
        for users, weights in sorted(found.items())
    ]


def _by_readers(chain: Chain, microbatches: int) -> list[tuple[_Places, Array]]:
    """Returns the units that make and that read tensors and shared weights, and the bytes, by the number of readers."""
    moved = [((flow.producer, *flow.consumers), flow.nbytes * microbatches) for flow in chain.flows]
    moved += [(weight.users, weight.crossing) for weight in chain.weights if len(weight.users) > 1]
    found: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ends, nbytes in moved:
        found.setdefault(len(ends), []).append((ends, nbytes))
    return [
        (np.asarray([ends for ends, _ in alike]), np.asarray([nbytes for _, nbytes in alike]))
        for alike in found.values()
    ]


def _joined(placement: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last chunk of each run of chunks that are on one stage."""
    first = 0
    for chunk, (stage, following) in enumerate(pairwise((*placement, -1))):
        if stage != following:
            yield first, chunk
            first = chunk + 1


def _pairs(count: int) -> Iterator[tuple[int, ...]]:
    """Yields the numbers of cuts that are moved together: one, two near each other, or two at both ends."""
    for first in range(count):
        yield (first,)
        for second in range(first + 1, count):
            if second - first <= _APART or first + second in (count - 1, count - 2, count):
                yield first, second


def _low_places(costs: RunCosts, chunks: int) -> list[_Places]:
    """Returns places where less passes than next to them, and places where less passes than anywhere near by."""
    count = costs.count
    places = np.arange(1, count)
    passes = costs.sent[0, places] + costs.sent[places, count]
    found = []
    for far in sorted({1, max(1, count // (4 * chunks))}):
        low = [at for at in range(count - 1) if passes[at] <= passes[max(0, at - far) : at + far + 1].min()]
        found.append(places[low])
    return found

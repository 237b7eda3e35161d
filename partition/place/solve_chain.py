"""Cuts a chain of units into stages, and finds the best of all contiguous cuts by dynamic programming.

    units   u0  u1  u2  u3  u4  u5  u6      best[k][j]: the first j units in k stages, at best
    stages  [───0───]  [──1──]  [──2──]     = min over i of worse(best[k - 1][i], cost of [i, j))

The cost of every run of units is computed first. A column holds all runs that end before unit j + 1, and follows from
the column before it. When unit j joins, a tensor that was made before the run and is read by j is received by exactly
those runs that start after its previous reader, and so on. Each record of a flow, a stash or a weight changes one slice
of the column.

What a run of units costs:

- time: compute, plus bytes received and sent over the link. A tensor that several stages need is
  received by each; the sender is charged for it once. The values and gradients of weights used on
  another stage cross once per step.
- memory: weights, gradients and slots of the variables it owns, copies of those it only uses, and
  as many stashes as the schedule keeps in flight on that stage.

A weight that several units use is owned by the stage of its first or of its last use. Every other stage that uses it
has a copy. Both are solved and the better is taken. Keeping all its uses on one stage needs no case of its own, since
only a cut between them costs a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product, zip_longest

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.place.placement import (
    Chain,
    Chunks,
    Placement,
    Ranks,
    check_units,
    costed,
    in_flight_of,
    placed_by_hand,
    step_time,
)
from smp_tf.partition.units.cost import Flow, Weight

_Array = NDArray[np.float64]
_UNREACHABLE = np.inf
#: Up to so many shared weights (groups with the same users) each choice of owners is tried; more are all owned alike.
MOST_SHARED_GROUPS = 3
#: The share by which two costs may differ and count as equal, since costs are estimates.
TOLERANCE = 0.005


@dataclass(frozen=True)
class ChainSolution(Placement):
    """The cut that was taken, in which every stage is a run of units, and how good a cut can be.

    Args:
        least: the score of the best cut. The cut that was taken is within the tolerance of it.
    """

    least: float = 0.0


def solve_chain(
    chain: Chain,
    stages: int,
    *,
    objective: str = "memory",
    microbatches: int = 1,
    in_flight: Sequence[int] | None = None,
    ranks: Ranks | None = None,
    tolerance: float = TOLERANCE,
    placement: Sequence[int] | None = None,
) -> ChainSolution:
    """Cuts a chain into exactly `stages` runs of units, none empty.

    Args:
        chain: the units and their costs.
        stages: number of stages.
        objective: "speed": least sum(c) + (microbatches - 1) max(c) over the stages' times c;
            "memory": least bytes on the fullest stage.
        microbatches: microbatches per step.
        in_flight: microbatches whose stash a stage holds at once, by the schedule; by default those of 1F1B, min(stages
            - r, microbatches).
        ranks: how these differ, and what they may need; None where they are alike and may need anything.
        tolerance: among the cuts that are this close to the best, the one with the least memory (for "speed") or time
            (for "memory") is taken, since costs are estimates.
        placement: the stage of each run, where runs are chunks and a stage may have several. A unit that is placed by
            hand may then be in any chunk of its stage. The costs are still those of runs.

    Returns:
        The cut, and what each run costs.

    Raises:
        PlacementError: there are fewer units than stages, or manual placements are not in order.
        MemoryLimitError: no cut keeps within what ranks may need.

    Example:
        >>> solve_chain(Chain(("a", "b", "c"), (1.0, 2.0, 3.0)), 2, objective="speed").cuts
        (2,)

    Source:
        Objective: Alpa (arXiv 2201.12023), section 5; the recurrence is the one for partitioning a
            chain.
    """
    if objective not in ("speed", "memory"):
        raise PlacementError(f'optimize must be "memory" or "speed". Received: {objective!r}.')
    held = in_flight_of(stages, microbatches, in_flight)
    ranks = ranks or Ranks.alike(stages)
    _check(chain, stages, placement)
    allowed = _earliest_starts(chain, placement or range(stages))
    best: Placement | None = None
    least = _UNREACHABLE
    for late in owner_choices(chain.weights):
        search = _Search(_Tables(chain, late, microbatches), allowed, held, microbatches, ranks)
        cuts, score = search.fastest(tolerance) if objective == "speed" else search.smallest(tolerance)
        if cuts is None:
            continue
        least = min(least, score)
        stage_of = chunks_of_cuts(cuts, len(chain.names))
        owners = {w.variable: stage_of[w.users[-1 if w.variable in late else 0]] for w in chain.weights}
        found = Placement(stage_of, owners, *search.of_cuts(cuts))
        if best is None or _order(found, objective, microbatches) < _order(best, objective, microbatches):
            best = found
    if best is None:
        raise _does_not_fit(chain, stages, allowed, held, microbatches, ranks)
    return ChainSolution(best.chunk_of, best.owners, best.times, best.memory, least=least)


def _order(placement: Placement, objective: str, microbatches: int) -> tuple[float, float]:
    """Returns the cost that is balanced, then the other one."""
    seconds, nbytes = placement.score("speed", microbatches), placement.score("memory", microbatches)
    return (seconds, nbytes) if objective == "speed" else (nbytes, seconds)


def follow_owners(
    chain: Chain,
    stages: int,
    owners: Mapping[int, int],
    microbatches: int = 1,
    chunks: Chunks | None = None,
    ranks: Ranks | None = None,
) -> Placement:
    """Puts the units of a chain where an earlier step put their variables. Chunks may stay empty.

        owned by chunk   -  0  -  -  1  -        GAN after training: only the generator, all of it in chunk 0
        placed in        0  0  0  0  1  1             0  0  -  0   ──▶  0  0  0  0

    A unit without an owned variable stays with the unit before it, so nothing more has to cross. A variable of several
    units pins none of them.

    Args:
        chain: the units. `pinned` holds the chunk that owns the unit's variables, or None.
        stages: number of stages.
        owners: chunk of variables whose owner an earlier step decided.
        microbatches: over which the copies of a step are spread.
        chunks: where the chunks are, and what they keep; None for one on every stage that keeps one microbatch.
        ranks: how these differ; None where they do not.

    Returns:
        The placement. Its times and memory are estimated as for any cut.

    Raises:
        PlacementError: data would have to flow from a later chunk to an earlier one.
    """
    chunks = chunks or Chunks.one_each([1] * stages)
    placed_by_hand(chain, stages)
    manual = chain.manual if chunks.are_stages else ()
    asked = [
        stage if pin is None else pin
        for pin, stage in zip_longest(chain.pinned or [None] * len(chain.names), manual, fillvalue=None)
    ]
    pins = [(chunk, name) for chunk, name in zip(asked, chain.names, strict=True) if chunk is not None]
    for (first, before), (second, name) in pairwise(pins):
        if second < first:
            raise PlacementError(
                f"An earlier step put the variables of {before!r} on stage {chunks.placement[first]} and those of "
                f"{name!r} on stage {chunks.placement[second]}, where they stay. In this step data flows from "
                f"{before!r} to {name!r}, and it cannot flow from a later stage to an earlier one. Let a step "
                f"that uses all of these layers run first: it then decides for the others. One call of predict on the "
                f"whole model, before the first fit, is enough."
            )
    chunk = pins[0][0] if pins else 0
    chunk_of = []
    for pin in asked:
        chunk = chunk if pin is None else pin
        chunk_of.append(chunk)
    return costed(chain, chunk_of, owners, microbatches, chunks, ranks)


def chunks_of_cuts(cuts: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns the run that each unit is in.

    Args:
        cuts: first unit of run 1, of run 2 and so on.
        count: number of units.
    """
    return tuple(stage for stage, (a, b) in enumerate(pairwise((0, *cuts, count))) for _ in range(b - a))


# --- what is asked --------------------------------------------------------------------------------


def _check(chain: Chain, stages: int, placement: Sequence[int] | None) -> None:
    if stages < 1:
        raise PlacementError(f"A model is cut into at least 1 partition. Received: {stages}.")
    check_units(chain.names, stages)
    by_hand = placed_by_hand(chain, stages if placement is None else 1 + max(placement))
    for (first, before), (second, name) in pairwise(by_hand):
        if second < first and placement is None:
            raise PlacementError(
                f"Partitions must follow the order in which data flows: {before!r}, on partition "
                f"{first}, comes before "
                f"{name!r}, on partition {second}. Place them in order, or set contiguous to false."
            )


def _earliest_starts(chain: Chain, placement: Sequence[int]) -> NDArray[np.int64]:
    """Returns, for every chunk and end, the first start of a run without units placed elsewhere."""
    count = len(chain.names)
    starts = np.zeros((len(placement), count + 1), np.int64)
    for unit, (stage, pin) in enumerate(zip_longest(chain.manual, chain.pinned, fillvalue=None)):
        elsewhere = [c for c, own in enumerate(placement) if stage not in (None, own) or pin not in (None, c)]
        starts[elsewhere, unit + 1 :] = unit + 1
    return starts


def owner_choices(weights: Sequence[Weight]) -> list[frozenset[int]]:
    """Returns the sets of shared variables to be owned by their last user instead of their first.

    Args:
        weights: all weights.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for weight in weights:
        if len(weight.users) > 1:
            groups.setdefault(weight.users, []).append(weight.variable)
    together = list(groups.values())
    if len(together) > MOST_SHARED_GROUPS:
        together = [[v for group in together for v in group]]
    return [
        frozenset(v for group, late in zip(together, choice, strict=True) if late for v in group)
        for choice in product((False, True), repeat=len(together))
    ]


# --- what runs of units cost ----------------------------------------------------------------------


class _Tables:
    """Cost of every run of units: entry [i, j] is the run from unit i to unit j - 1.

    Args:
        chain: the units.
        late: shared variables owned by their last user.
        microbatches: over which the copies of a step are spread.
    """

    def __init__(self, chain: Chain, late: frozenset[int], microbatches: int) -> None:
        self.count = count = len(chain.names)
        self.compute = np.full((count + 1, count + 1), _UNREACHABLE)
        self.moved = np.zeros((count + 1, count + 1))
        self.weights = np.zeros((count + 1, count + 1))
        self.stash = np.zeros((count + 1, count + 1))
        joins: list[list[tuple[int, _Array, int, int, float]]] = [[] for _ in range(count)]
        traffic, stored, kept = np.zeros(count), np.zeros(count), np.zeros(count)

        def when(unit: int, column: _Array, low: int, high: int, amount: float) -> None:
            """Changes runs that start in [low, high) by `amount` when `unit` joins."""
            joins[unit].append((unit, column, low, high, amount))

        def with_any(column: _Array, units: Sequence[int], amount: float, after: int = -1) -> None:
            """Returns the runs that hold any of the units, and start after `after`."""
            for unit in units:
                if unit > after:
                    when(unit, column, after + 1, unit + 1, amount)
                    after = unit

        for flow in chain.flows:
            _add_flow(flow, traffic, when, with_any)
        for stash in chain.stashes:
            with_any(kept, stash.readers, stash.nbytes)
        for weight in chain.weights:
            owner = weight.users[-1] if weight.variable in late else weight.users[0]
            with_any(stored, weight.users, weight.copied)
            when(owner, stored, 0, owner + 1, weight.stored - weight.copied)
            if len(weight.users) > 1:
                # The owner sends the value and receives the gradient. Each other stage receives the value and sends the
                # gradient.
                crossing = (weight.value + (weight.gradient and weight.value)) / microbatches
                with_any(traffic, weight.users, crossing)
                first, last = weight.users[0], weight.users[-1]
                when(last, traffic, 0, first + 1, -crossing)
        total = np.concatenate([[0.0], np.cumsum(np.asarray(chain.times, np.float64))])
        for end in range(1, count + 1):
            for _, column, low, high, amount in joins[end - 1]:
                column[low:high] += amount
            self.compute[:end, end] = total[end] - total[:end]
            self.moved[:end, end] = traffic[:end] * chain.seconds_per_byte
            self.weights[:end, end] = stored[:end]
            self.stash[:end, end] = kept[:end]

    def time(self, speed: float, link: float) -> _Array:
        """Returns the seconds of every run on a rank of a given speed."""
        return self.compute / speed + self.moved / link

    def memory(self, in_flight: int) -> _Array:
        """Returns the bytes of every run on a stage that holds a given number of stashes."""
        return self.weights + in_flight * self.stash


def _add_flow(flow: Flow, traffic: _Array, when: Callable[..., None], with_any: Callable[..., None]) -> None:
    """Adds the bytes that runs receive and send of one tensor.

    forward   p ──▶ c1 ──▶ c2      received by runs that start after p and hold a reader;
                                   sent by runs that hold p and end before c2
    backward  c1 ◀── c2 ◀── p      received by runs that end before p and hold a reader;
                                   sent by runs that hold p and start after c1
    """
    ahead = [c for c in flow.consumers if c > flow.producer]
    behind = [c for c in flow.consumers if c < flow.producer]
    if ahead:
        with_any(traffic, ahead, flow.nbytes, after=flow.producer)
        when(flow.producer, traffic, 0, flow.producer + 1, flow.nbytes)
        when(ahead[-1], traffic, 0, flow.producer + 1, -flow.nbytes)
    if behind:
        with_any(traffic, behind, flow.nbytes)
        when(flow.producer, traffic, 0, behind[-1] + 1, -flow.nbytes)
        when(flow.producer, traffic, behind[0] + 1, flow.producer + 1, flow.nbytes)


# --- the search -----------------------------------------------------------------------------------


class _Search:
    """Finds best cuts over given tables. Every method returns cuts, or None where none is legal."""

    def __init__(
        self,
        tables: _Tables,
        starts: NDArray[np.int64],
        in_flight: Sequence[int],
        microbatches: int,
        ranks: Ranks,
    ) -> None:
        self._tables = tables
        self._starts = starts
        self._microbatches = microbatches
        self._limits = [_UNREACHABLE if limit is None else limit for limit in ranks.memory]
        self._stages = len(in_flight)
        # Ranks that are alike share an array.
        speeds = list(zip(ranks.speed, ranks.link, strict=True))
        time_of = {speed: tables.time(*speed) for speed in set(speeds)}
        memory_of = {kept: tables.memory(kept) for kept in set(in_flight)}
        self._time = [time_of[speed] for speed in speeds]
        self._memory = [memory_of[kept] for kept in in_flight]

    def of_cuts(self, cuts: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the time and memory of every stage."""
        runs = list(enumerate(pairwise((0, *cuts, self._tables.count))))
        return (
            tuple(float(self._time[r][a, b]) for r, (a, b) in runs),
            tuple(float(self._memory[r][a, b]) for r, (a, b) in runs),
        )

    def step_time(self, cuts: Sequence[int]) -> float:
        """Estimates the seconds of a step."""
        return step_time(self.of_cuts(cuts)[0], self._microbatches)

    def smallest(self, tolerance: float) -> tuple[tuple[int, ...] | None, float]:
        """Returns the cuts with the least memory on the fullest stage, then the least step time; and that memory."""
        cuts = self._minimise(self._memory, np.maximum)
        if cuts is None:
            return None, _UNREACHABLE
        least = max(self.of_cuts(cuts)[1])
        return self._fastest_within(least * (1 + tolerance)), least

    def fastest(self, tolerance: float) -> tuple[tuple[int, ...] | None, float]:
        """Returns the cuts with the least step time, then the least memory on the fullest stage; and that time."""
        cuts = self._fastest_within(_UNREACHABLE)
        if cuts is None:
            return None, _UNREACHABLE
        least = self.step_time(cuts)
        slowest = max(self.of_cuts(cuts)[0]) * (1 + tolerance)
        lean = self._minimise(self._memory, np.maximum, time=slowest)
        if lean is None:
            return cuts, least
        lean = self._fastest_within(max(self.of_cuts(lean)[1])) or cuts
        return (lean if self.step_time(lean) <= least * (1 + tolerance) else cuts), least

    def _fastest_within(self, memory: float) -> tuple[int, ...] | None:
        """Returns the cut with the least sum of times + (microbatches - 1) longest time, within a memory limit.

        The search starts at the cut with the least sum. It bounds the longest time lower and lower, until the gain that
        is left cannot make up for the larger sum. The smallest longest time of any cut is the floor.
        """
        evenest = self._minimise(self._time, np.maximum, memory=memory)
        if evenest is None:
            return None
        floor = max(self.of_cuts(evenest)[0])
        best, bound = evenest, _UNREACHABLE
        # Of the most even cuts, the one with the least sum.
        even = self._minimise(self._time, np.add, memory=memory, time=floor * (1 + 1e-12))
        if even is not None and self.step_time(even) < self.step_time(best):
            best = even
        while True:
            cuts = self._minimise(self._time, np.add, memory=memory, time=bound)
            if cuts is None:
                return best
            times, _ = self.of_cuts(cuts)
            if self.step_time(cuts) < self.step_time(best):
                best = cuts
            least, others = self.step_time(best) * (1 - 1e-12), self._microbatches - 1
            if sum(times) + others * floor >= least:
                return best
            # A more even cut has no smaller sum. To be better, its longest time must make up for that. It is below the
            # longest in any case, since sums of sizes that cancel out may leave a time just under zero.
            bound = np.nextafter(min(max(times), max(times) * (1 - 1e-12)), -np.inf)
            if others:
                bound = min(bound, (least - sum(times)) / others)

    def _minimise(
        self,
        costs: Sequence[_Array],
        combine: np.ufunc,
        memory: float = _UNREACHABLE,
        time: float = _UNREACHABLE,
    ) -> tuple[int, ...] | None:
        """Returns the cuts whose combined cost is least, with every stage within the given bounds.

        Args:
            costs: the cost of every run, on each stage.
            combine: np.maximum or np.add.
            memory: bytes that no stage may exceed, besides the limit of its rank.
            time: seconds that no stage may exceed.
        """
        tables, count = self._tables, self._tables.count
        best = np.full(count + 1, _UNREACHABLE)
        best[0] = 0.0
        choices = []
        begins = np.arange(count + 1)[:, None]
        for stage in range(self._stages):
            cost, most = costs[stage], min(memory, self._limits[stage])
            legal = (begins >= self._starts[stage][None, :]) & np.isfinite(tables.compute)
            if most != _UNREACHABLE:
                legal &= self._memory[stage] <= most
            if time != _UNREACHABLE:
                legal &= self._time[stage] <= time
            total = np.where(legal, combine(best[:, None], cost), _UNREACHABLE)
            choice = total.argmin(axis=0)
            best = total[choice, begins[:, 0]]
            choices.append(choice)
        if not np.isfinite(best[count]):
            return None
        cuts, end = [], count
        for choice in reversed(choices[1:]):
            end = int(choice[end])
            cuts.append(end)
        return tuple(reversed(cuts))


def _does_not_fit(
    chain: Chain,
    stages: int,
    starts: NDArray[np.int64],
    in_flight: Sequence[int],
    microbatches: int,
    ranks: Ranks,
) -> PlacementError:
    """Returns why no cut was found: a limit, and the stage that exceeds it in the best cut without a limit."""
    without = Ranks(ranks.speed, ranks.link, (None,) * stages)
    search = _Search(_Tables(chain, frozenset(), microbatches), starts, in_flight, microbatches, without)
    cuts, _ = search.smallest(0.0)
    if cuts is None:
        return PlacementError(
            f"No cut into {stages} partitions agrees with the manual placements: between two placed layers there must "
            f"be at least one unit for every partition between theirs."
        )
    _, memory = search.of_cuts(cuts)
    limits = [_UNREACHABLE if limit is None else limit for limit in ranks.memory]
    worst = max(range(stages), key=lambda r: memory[r] - limits[r])
    bounds = (0, *cuts, len(chain.names))
    inside = chain.names[bounds[worst] : bounds[worst + 1]]
    what = f"{inside[0]} alone is" if len(inside) == 1 else f"{inside[0]} to {inside[-1]} are"
    return MemoryLimitError(
        f"No cut into {stages} partitions fits in memory_limit. Stage {worst}: {what} "
        f"{memory[worst] / 2**30:.2f} GiB, the limit is {limits[worst] / 2**30:.2f} GiB."
    )

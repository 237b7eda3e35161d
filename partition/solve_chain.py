"""Cut a chain of units into stages: the best of all contiguous cuts, by dynamic programming.

    units   u0  u1  u2  u3  u4  u5  u6      best[k][j]: the first j units in k stages, at best
    stages  [───0───]  [──1──]  [──2──]     = min over i of worse(best[k - 1][i], cost of [i, j))

The cost of every run of units is needed first. A column (all runs that end before unit j + 1)
follows from the one before it: when unit j joins, a tensor made before the run and read by j is
received by exactly those runs that start after its previous reader, and so on; each record of a
flow, a stash or a weight changes one slice of the column.

What a run of units costs:

- time: compute, plus bytes received and sent over the link. A tensor that several stages need is
  received by each; the sender is charged for it once. The values and gradients of weights used on
  another stage cross once per step.
- memory: weights, gradients and slots of the variables it owns, copies of those it only uses, and
  as many stashes as the schedule keeps in flight on that stage.

A weight used by several units is owned by the stage of its first or of its last use; every other
stage that uses it has a copy. Both are solved and the better is taken. Keeping all its uses on one
stage needs no case of its own: it is the cut between them that costs the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.cost import Costs, Flow, Stash, Weight
from smp_tf.partition.errors import MemoryLimitError, PlacementError

_Array = NDArray[np.float64]
_UNREACHABLE = np.inf
#: More shared weights than this (groups with the same users) are all owned alike.
_MAX_SHARED_GROUPS = 3


@dataclass(frozen=True)
class Chain:
    """Units in topological order with everything a cut is costed from.

    Args:
        names: of the units, for messages.
        times: seconds of compute of each unit per microbatch, forward and backward.
        flows, stashes, weights: see `cost`.
        manual: stage that each unit must be on, or None.
        seconds_per_byte: of the link between two stages.
    """

    names: tuple[str, ...]
    times: tuple[float, ...]
    flows: tuple[Flow, ...] = ()
    stashes: tuple[Stash, ...] = ()
    weights: tuple[Weight, ...] = ()
    manual: tuple[int | None, ...] = ()
    seconds_per_byte: float = 0.0

    @classmethod
    def of(cls, names: Sequence[str], manual: Sequence[int | None], costs: Costs) -> Chain:
        """The chain of a step's units with their estimated costs."""
        return cls(
            names=tuple(names),
            times=tuple(u.time_forward + u.time_backward for u in costs.units),
            flows=costs.flows,
            stashes=costs.stashes,
            weights=costs.weights,
            manual=tuple(manual),
            seconds_per_byte=1.0 / costs.machine.link,
        )


@dataclass(frozen=True)
class ChainSolution:
    """Contiguous stages for a chain.

    Args:
        cuts: first unit of stage 1, of stage 2 and so on.
        stage_of: stage of each unit.
        owners: for each variable that units use, the stage that stores it.
        times: seconds of each stage per microbatch, transfers included.
        memory: bytes of each stage.
    """

    cuts: tuple[int, ...]
    stage_of: tuple[int, ...]
    owners: dict[int, int]
    times: tuple[float, ...]
    memory: tuple[float, ...]


def solve_chain(
    chain: Chain,
    stages: int,
    *,
    objective: str = "memory",
    microbatches: int = 1,
    in_flight: Sequence[int] | None = None,
    memory_limit: float | None = None,
    tolerance: float = 0.03,
) -> ChainSolution:
    """Cut a chain into exactly `stages` runs of units, none empty.

    Args:
        chain: the units and their costs.
        stages: number of stages.
        objective: "speed": least sum(c) + (microbatches - 1) max(c) over the stages' times c;
            "memory": least bytes on the fullest stage.
        microbatches: microbatches per step.
        in_flight: microbatches whose stash a stage holds at once, from the schedule in use; by
            default what 1F1B keeps, min(stages - r, microbatches).
        memory_limit: bytes no stage may exceed, or None.
        tolerance: of the cuts that are this close to the best, the one with the least memory (for
            "speed") or time (for "memory") is taken: costs are estimates, and a small difference is
            none.

    Returns:
        The cuts, and what each stage costs.

    Raises:
        PlacementError: there are fewer units than stages, or manual placements are not in order.
        MemoryLimitError: no cut fits in the memory limit.

    Example:
        >>> solve_chain(Chain(("a", "b", "c"), (1.0, 2.0, 3.0)), 2, objective="speed").cuts
        (2,)

    Source:
        Objective: Alpa (arXiv 2201.12023), section 5; the recurrence is the one for partitioning a
            chain.
    """
    if objective not in ("speed", "memory"):
        raise PlacementError(f'optimize must be "memory" or "speed". Received: {objective!r}.')
    if in_flight is None:
        in_flight = [min(stages - r, microbatches) for r in range(stages)]
    if len(in_flight) != stages:
        raise ValueError(f"in_flight must have one entry per stage: received {len(in_flight)} for {stages} stages.")
    _check(chain, stages)
    allowed = _earliest_starts(chain, stages)
    best: tuple[tuple[float, float], ChainSolution] | None = None
    for late in _owner_choices(chain.weights):
        tables = _Tables(chain, late, microbatches)
        search = _Search(tables, allowed, in_flight, microbatches, memory_limit)
        cuts = search.fastest(tolerance) if objective == "speed" else search.smallest(tolerance)
        if cuts is None:
            continue
        times, memory = search.of_cuts(cuts)
        score = (search.step_time(cuts), max(memory))
        score = score if objective == "speed" else (score[1], score[0])
        if best is None or score < best[0]:
            stage_of = _stage_of(cuts, len(chain.names))
            owners = {w.variable: stage_of[w.users[-1 if w.variable in late else 0]] for w in chain.weights}
            best = score, ChainSolution(cuts, stage_of, owners, times, memory)
    if best is None:
        raise _does_not_fit(chain, stages, allowed, in_flight, microbatches, memory_limit)
    return best[1]


def follow_owners(
    chain: Chain,
    stages: int,
    owners: Mapping[int, int],
    microbatches: int = 1,
    in_flight: Sequence[int] | None = None,
) -> ChainSolution:
    """Put the units of a chain where an earlier step put their variables; stages may stay empty.

        owned by stage   -  0  -  -  1  -        GAN after training: only the generator, all of it on stage 0
        placed on        0  0  0  0  1  1             0  0  -  0   ──▶  0  0  0  0

    A unit without an owned variable stays with the unit before it: nothing crosses for it but what would anyway. A
    variable of several units is the pin of none of them.

    Args:
        chain: the units; `manual` holds the stage that owns the unit's variables, or None.
        stages: number of stages.
        owners: stage of variables whose owner an earlier step decided.
        microbatches: over which the copies of a step are spread.
        in_flight: microbatches whose stash a stage holds at once; by default one.

    Returns:
        The stages; times and memory are estimated as for any cut.

    Raises:
        PlacementError: data would have to flow from a later stage to an earlier one.
    """
    pins = _placed(chain, stages)
    for (first, before), (second, name) in pairwise(pins):
        if second < first:
            raise PlacementError(
                f"An earlier step put the variables of {before!r} on stage {first} and those of {name!r} on stage "
                f"{second}, where they stay. In this step data flows from {before!r} to {name!r}, and it cannot flow "
                f"from a later stage to an earlier one. Run the step that uses all of these layers first: it then "
                f"decides for the others."
            )
    stage = pins[0][0] if pins else 0
    stage_of = []
    for pin in chain.manual:
        stage = stage if pin is None else pin
        stage_of.append(stage)
    cuts = tuple(sum(s < later for s in stage_of) for later in range(1, stages))
    decided = {w.variable: owners.get(w.variable, stage_of[w.users[0]]) for w in chain.weights}
    tables = _Tables(chain, frozenset(), microbatches)
    search = _Search(tables, _earliest_starts(chain, stages), in_flight or [1] * stages, microbatches, None)
    times, memory = search.of_cuts(cuts)
    finite = tuple(t if np.isfinite(t) else 0.0 for t in times)
    return ChainSolution(cuts, tuple(stage_of), decided, finite, memory)


def _stage_of(cuts: Sequence[int], count: int) -> tuple[int, ...]:
    """Stage of every unit."""
    return tuple(stage for stage, (a, b) in enumerate(pairwise((0, *cuts, count))) for _ in range(b - a))


# --- what is asked --------------------------------------------------------------------------------


def _check(chain: Chain, stages: int) -> None:
    count = len(chain.names)
    if stages < 1:
        raise PlacementError(f"A model is cut into at least 1 partition. Received: {stages}.")
    if stages > count:
        raise PlacementError(
            f"The model has {count} unit{'s' if count != 1 else ''} that can be put on different "
            f"partitions "
            f"({_listed(chain.names)}), and every partition needs at least one. Received: "
            f"partitions={stages}; "
            f"the largest possible is {count}. Use fewer partitions, or build the model of more "
            f"layers."
        )
    for (first, before), (second, name) in pairwise(_placed(chain, stages)):
        if second < first:
            raise PlacementError(
                f"Partitions must follow the order in which data flows: {before!r}, on partition "
                f"{first}, comes before "
                f"{name!r}, on partition {second}. Place them in order."
            )


def _placed(chain: Chain, stages: int) -> list[tuple[int, str]]:
    """Stage and name of the units whose stage is given."""
    placed = [(stage, name) for stage, name in zip(chain.manual, chain.names, strict=False) if stage is not None]
    for stage, name in placed:
        if not 0 <= stage < stages:
            raise PlacementError(
                f"{name!r} was placed on partition {stage}. There are {stages}: use 0 to {stages - 1}."
            )
    return placed


def _listed(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … {len(names) - most} more"


def _earliest_starts(chain: Chain, stages: int) -> NDArray[np.int64]:
    """For every stage and end, the first start of a run without units placed elsewhere."""
    count = len(chain.names)
    starts = np.zeros((stages, count + 1), np.int64)
    for unit, stage in enumerate(chain.manual):
        if stage is not None:
            elsewhere = [s for s in range(stages) if s != stage]
            starts[elsewhere, unit + 1 :] = unit + 1
    return starts


def _owner_choices(weights: Sequence[Weight]) -> list[frozenset[int]]:
    """Sets of shared variables to be owned by their last user instead of their first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for weight in weights:
        if len(weight.users) > 1:
            groups.setdefault(weight.users, []).append(weight.variable)
    together = list(groups.values())
    if len(together) > _MAX_SHARED_GROUPS:
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
        self.time = np.full((count + 1, count + 1), _UNREACHABLE)
        self.weights = np.zeros((count + 1, count + 1))
        self.stash = np.zeros((count + 1, count + 1))
        joins: list[list[tuple[int, _Array, int, int, float]]] = [[] for _ in range(count)]
        traffic, stored, kept = np.zeros(count), np.zeros(count), np.zeros(count)

        def when(unit: int, column: _Array, low: int, high: int, amount: float) -> None:
            """When `unit` joins, runs that start in [low, high) change by `amount`."""
            joins[unit].append((unit, column, low, high, amount))

        def with_any(column: _Array, units: Sequence[int], amount: float, after: int = -1) -> None:
            """Runs that hold any of the units, and start after `after`."""
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
                # The owner sends the value and receives the gradient; each other stage the other
                # way round.
                crossing = (weight.value + (weight.gradient and weight.value)) / microbatches
                with_any(traffic, weight.users, crossing)
                first, last = weight.users[0], weight.users[-1]
                when(last, traffic, 0, first + 1, -crossing)
        total = np.concatenate([[0.0], np.cumsum(np.asarray(chain.times, np.float64))])
        for end in range(1, count + 1):
            for _, column, low, high, amount in joins[end - 1]:
                column[low:high] += amount
            self.time[:end, end] = total[end] - total[:end] + traffic[:end] * chain.seconds_per_byte
            self.weights[:end, end] = stored[:end]
            self.stash[:end, end] = kept[:end]

    def memory(self, in_flight: int) -> _Array:
        """Bytes of every run on a stage that holds so many stashes."""
        return self.weights + in_flight * self.stash


def _add_flow(flow: Flow, traffic: _Array, when: Callable[..., None], with_any: Callable[..., None]) -> None:
    """Bytes that runs receive and send of one tensor.

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
    """Finds best cuts over given tables; every method gives cuts, or None where none is legal."""

    def __init__(
        self,
        tables: _Tables,
        starts: NDArray[np.int64],
        in_flight: Sequence[int],
        microbatches: int,
        memory_limit: float | None,
    ) -> None:
        self._tables = tables
        self._starts = starts
        self._in_flight = in_flight
        self._microbatches = microbatches
        self._limit = _UNREACHABLE if memory_limit is None else memory_limit
        self._stages = len(in_flight)

    def of_cuts(self, cuts: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Time and memory of every stage."""
        t = self._tables
        runs = list(pairwise((0, *cuts, t.count)))
        times = tuple(float(t.time[a, b]) for a, b in runs)
        memory = tuple(
            float(t.weights[a, b] + kept * t.stash[a, b]) for (a, b), kept in zip(runs, self._in_flight, strict=True)
        )
        return times, memory

    def step_time(self, cuts: Sequence[int]) -> float:
        """Estimated seconds of a step."""
        times, _ = self.of_cuts(cuts)
        return sum(times) + (self._microbatches - 1) * max(times)

    def smallest(self, tolerance: float) -> tuple[int, ...] | None:
        """Least memory on the fullest stage, then least step time."""
        cuts = self._minimise(lambda r: self._tables.memory(self._in_flight[r]), np.maximum, memory=self._limit)
        if cuts is None:
            return None
        _, memory = self.of_cuts(cuts)
        return self._fastest_within(min(max(memory) * (1 + tolerance), self._limit))

    def fastest(self, tolerance: float) -> tuple[int, ...] | None:
        """Least step time, then least memory on the fullest stage."""
        cuts = self._fastest_within(self._limit)
        if cuts is None:
            return None
        slowest = max(self.of_cuts(cuts)[0]) * (1 + tolerance)
        lean = self._minimise(
            lambda r: self._tables.memory(self._in_flight[r]),
            np.maximum,
            memory=self._limit,
            time=slowest,
        )
        if lean is None:
            return cuts
        lean = self._fastest_within(max(self.of_cuts(lean)[1])) or cuts
        return lean if self.step_time(lean) <= self.step_time(cuts) * (1 + tolerance) else cuts

    def _fastest_within(self, memory: float) -> tuple[int, ...] | None:
        """Least sum of times + (microbatches - 1) longest time, among cuts within a memory limit.

        The least longest time is a floor. From the least sum on, the longest time is then bounded
        lower and lower, until what is left to gain cannot make up for the larger sum.
        """
        evenest = self._minimise(lambda r: self._tables.time, np.maximum, memory=memory)
        if evenest is None:
            return None
        floor = max(self.of_cuts(evenest)[0])
        best, bound = evenest, _UNREACHABLE
        # Of the cuts as even as the evenest, the one with the least sum.
        even = self._minimise(lambda r: self._tables.time, np.add, memory=memory, time=floor * (1 + 1e-12))
        if even is not None and self.step_time(even) < self.step_time(best):
            best = even
        while True:
            cuts = self._minimise(lambda r: self._tables.time, np.add, memory=memory, time=bound)
            if cuts is None:
                return best
            times, _ = self.of_cuts(cuts)
            if self.step_time(cuts) < self.step_time(best):
                best = cuts
            if sum(times) + (self._microbatches - 1) * floor >= self.step_time(best) * (1 - 1e-12):
                return best
            bound = np.nextafter(max(times) * (1 - 1e-12), 0.0)

    def _minimise(
        self,
        cost_on: Callable[[int], _Array],
        combine: np.ufunc,
        memory: float = _UNREACHABLE,
        time: float = _UNREACHABLE,
    ) -> tuple[int, ...] | None:
        """Cuts whose combined cost is least, every stage within the given bounds.

        Args:
            cost_on: the cost of every run on a stage.
            combine: np.maximum or np.add.
            memory: bytes no stage may exceed.
            time: seconds no stage may exceed.
        """
        tables, count = self._tables, self._tables.count
        best = np.full(count + 1, _UNREACHABLE)
        best[0] = 0.0
        choices = []
        begins = np.arange(count + 1)[:, None]
        for stage in range(self._stages):
            cost = cost_on(stage)
            legal = (begins >= self._starts[stage][None, :]) & np.isfinite(tables.time)
            if memory != _UNREACHABLE:
                legal &= tables.memory(self._in_flight[stage]) <= memory
            if time != _UNREACHABLE:
                legal &= tables.time <= time
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
    memory_limit: float | None,
) -> PlacementError:
    """Why no cut was found: the limit, and the stage that breaks it in the best cut without one."""
    search = _Search(_Tables(chain, frozenset(), microbatches), starts, in_flight, microbatches, None)
    cuts = search.smallest(0.0)
    if cuts is None:
        return PlacementError(
            f"No cut into {stages} partitions agrees with the manual placements: between two "
            f"placed layers there must "
            f"be at least one unit for every partition between theirs."
        )
    _, memory = search.of_cuts(cuts)
    fullest = max(range(stages), key=lambda r: memory[r])
    bounds = (0, *cuts, len(chain.names))
    inside = chain.names[bounds[fullest] : bounds[fullest + 1]]
    limit = 0.0 if memory_limit is None else memory_limit
    what = f"{inside[0]} alone is" if len(inside) == 1 else f"{inside[0]} to {inside[-1]} are"
    return MemoryLimitError(
        f"No cut into {stages} partitions fits in memory_limit. Stage {fullest}: {what} "
        f"{memory[fullest] / 2**30:.2f} GiB, the limit is {limit / 2**30:.2f} GiB."
    )

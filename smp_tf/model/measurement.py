"""Measures units of all ranks at the same time, and puts together what they have measured.

The ranks of a host slow each other down, as in training. Some units are measured once more while the others wait.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.job.exchange import allgather_json, barrier
from smp_tf.model.measuring_shifts import shifts_of
from smp_tf.partition.units.cost import Costs
from smp_tf.pipeline import allocator
from smp_tf.pipeline.measure.profile import ReadyUnit
from smp_tf.pipeline.planner.unit_peaks import UnitPeaks
from smp_tf.watch.failure import type_and_words

#: Seconds forward and backward of a microbatch, by unit.
Times = dict[str, tuple[float, float]]
#: The most bytes forward and backward, by unit.
Peaks = dict[str, tuple[int, int]]
#: Seconds forward and backward.
Pair: TypeAlias = Sequence[float]
#: A unit, or its times.
Made = TypeVar("Made")
#: How many units that do the same are measured.
_MOST_OF_A_KIND = 7
#: How many units of each rank are also measured alone.
_UNITS_ALONE = 4
#: How many ranks of a host measure alone, one after the other.
_RANKS_ALONE = 3


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured of a model's units.

    Args:
        times: times of units while all other ranks of the host run units, too.
        alone: the share of these times that units take, forward and backward, while the other ranks of a host wait.
        message: the processor's seconds that a message between two ranks of a host takes at each of its ends, and those
            for every byte; None where no host has two ranks of a replica.
        failed: why other units have no times.
        peaks: the most bytes that units have; none where the allocator does not count.
    """

    times: Times
    alone: tuple[float, float] = (1.0, 1.0)
    message: tuple[float, float] | None = None
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    peaks: UnitPeaks = dataclasses.field(default_factory=UnitPeaks)


class Taken(NamedTuple):
    """What a unit took forward and backward.

    Attributes:
        seconds: of a microbatch.
        peaks: the most bytes that it had at once; None where the allocator does not count.
    """

    seconds: tuple[float, float]
    peaks: tuple[int, int] | None


def measure_in_rounds(
    what: str,
    names: Sequence[str],
    make: Callable[[int], ReadyUnit],
    rounds: int,
    progress: Callable[[int], None] = lambda done: None,
    failed: dict[str, str] | None = None,
) -> Measurement:
    """Measures units of all ranks at the same time, as far as there are processors, and some of them alone.

    Args:
        what: words for what is done, the same on all ranks.
        names: names of this rank's units, the most expensive first.
        make: returns one of these, by its position, ready to be measured. It is kept only as long as that takes.
        rounds: the largest number of units that a rank has.
        progress: takes the number of rounds that are done.
        failed: takes the units of this rank that TensorFlow cannot run, with the reasons.

    Returns:
        The measurement of all units, as the median over ranks that had the same one. It is the same on all ranks.
    """
    topology = runtime.current().topology
    together = max(collections.Counter(topology.hosts).values())
    usable = allgather_json(sorted(os.sched_getaffinity(0)), name=what)
    shifts = shifts_of(topology.rank, topology.hosts, usable)
    measured: Times = {}
    peaks: Peaks = {}
    both: list[tuple[Pair, Pair]] = []
    ready: ReadyUnit | None = None

    def attempt(work: Callable[[], Made]) -> Made | None:
        # A unit that cannot run on made-up numbers, or that runs backward no more often than forward, such as
        # py_function.
        try:
            return work()
        except tf.errors.OpError as error:
            if failed is not None and turn < len(names):
                failed[names[turn]] = next(line for line in type_and_words(error).splitlines() if line.strip())
            return None

    for turn in range(rounds):
        mine = turn < len(names)
        if mine:
            # Not while the one before it is kept, since a rank holds the weights of one unit.
            ready = None
            ready = attempt(functools.partial(make, turn))
        # Ranks that share a host slow each other down, as in training. A rank that has no unit left measures its last
        # one again, so that the others are not alone.
        own: Taken | None = None
        for shift in range(shifts.count):
            barrier(name=what)
            if shift in shifts.mine and ready is not None:
                now = attempt(functools.partial(as_forward_and_backward, ready, shifts.crowd))
                ready = ready if now is not None else None
                own = own or now
        if mine and own is not None:
            measured[names[turn]] = own.seconds
            peaks |= {names[turn]: own.peaks} if own.peaks is not None else {}
        if turn < _UNITS_ALONE and together > 1:
            for rank in range(min(together, _RANKS_ALONE)):
                barrier(name=what)
                if (
                    own is not None
                    and ready is not None
                    and (topology.local_rank, topology.local_size) == (rank, together)
                ):
                    both.append((own.seconds, as_forward_and_backward(ready).seconds))
            # Nor does any rank make its next unit meanwhile.
            barrier(name=what)
        progress(turn + 1)
    return put_together(allgather_json([measured, both, peaks], name=what), together)


def put_together(said: Sequence[Any], together: int) -> Measurement:
    """Returns what ranks have measured: of a unit that several had, the median of times, and the most bytes.

    Args:
        said: of each rank, times by unit, times of units next to others and alone, and bytes by unit.
        together: how many ranks of a host measured at the same time.
    """
    medians = _medians_by(chain.from_iterable(times.items() for times, _, _ in said))
    most = _most_by(chain.from_iterable(peaks.items() for _, _, peaks in said))
    return Measurement(
        medians,
        shares_alone([pair for _, pairs, _ in said for pair in pairs], together),
        # Where the allocator of a rank does not count, nothing is said of any unit.
        peaks=UnitPeaks(most, allocator.counted_from()) if most.keys() == medians.keys() else UnitPeaks(),
    )


def shares_alone(both: Sequence[tuple[Pair, Pair]], together: int) -> tuple[float, float]:
    """Returns the share of its time next to others that a task takes alone, forward and backward.

    Args:
        both: seconds forward and backward of units, next to others and alone.
        together: how many run together, with this one.

    Returns:
        Two shares of at most 1, since what took longer alone was disturbed. A share is not below 1 / together, since a
        processor cannot give more to one than it gave to all.

    Example:
        >>> shares_alone([((2.0, 4.0), (2.0, 2.5)), ((2.0, 4.0), (2.5, 1.5))], together=2)
        (1.0, 0.5)
    """

    def share(sweep: int) -> float:
        beside, alone = (sum(pair[which][sweep] for pair in both) for which in (0, 1))
        return min(1.0, max(1.0 / together, alone / beside)) if beside else 1.0

    return share(0), share(1)


def as_forward_and_backward(ready: ReadyUnit, crowd: float = 1.0) -> Taken:
    """Returns what a unit took forward and backward: in its first sweep, and in all others.

    Args:
        ready: the unit.
        crowd: how many ranks share a processor in a training. Each has it for so much less of the time.
    """
    found = ready.measure()
    ahead = [taken for sweep, taken in found.items() if not sweep]
    back = [taken for sweep, taken in found.items() if sweep]
    seconds = crowd * sum(taken.seconds for taken in ahead), crowd * sum(taken.seconds for taken in back)
    if any(taken.peak is None for taken in found.values()):
        return Taken(seconds, None)
    forward, backward = (max((taken.peak or 0 for taken in sweeps), default=0) for sweeps in (ahead, back))
    return Taken(seconds, (forward, backward))


def first_of_a_kind(work: Sequence[str]) -> list[int]:
    """Returns the numbers of the units to be measured, of those with the same work the first few.

    Args:
        work: what every unit does, equal where units do the same.
    """
    seen: collections.Counter[str] = collections.Counter()
    chosen = []
    for number, kind in enumerate(work):
        seen[kind] += 1
        if seen[kind] <= _MOST_OF_A_KIND:
            chosen.append(number)
    return chosen


def shares(costs: Costs, units: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns which units each rank measures. By the estimates, all ranks take about equally long.

    Args:
        costs: costs of all units.
        units: the numbers of those to be measured.
        ranks: ranks of a replica.

    Returns:
        The indices of each rank's units, the most expensive first. So units that are measured at the same time are
        alike.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(units, key=lambda u: (-_seconds(costs, u), u))
    for place, unit in enumerate(order):
        turn, rank = divmod(place, ranks)
        found[rank if turn % 2 == 0 else ranks - 1 - rank].append(unit)
    return found


def _seconds(costs: Costs, unit: int) -> float:
    return costs.units[unit].seconds.both


def medians_of_equals(times: Times, work: Mapping[str, str]) -> Times:
    """Returns the times of units, where units with the same work have the median over all of them.

    Equal layers take equally long. Where they do not seem to, something else disturbed one of them.

    Args:
        times: seconds forward and backward, by unit.
        work: what each unit does, equal where units do the same. Units that are not named have no times.

    Returns:
        The times, in the order of `work`, also of units that were not measured and do the same as others.

    Example:
        >>> medians_of_equals({"a": (1.0, 2.0), "b": (1.2, 9.0), "c": (9.0, 3.0)}, dict.fromkeys("abcd", "Dense"))
        {'a': (1.2, 3.0), 'b': (1.2, 3.0), 'c': (1.2, 3.0), 'd': (1.2, 3.0)}
    """
    medians = _medians_by((work[name], pair) for name, pair in times.items() if name in work)
    return {name: medians[kind] for name, kind in work.items() if kind in medians}


def most_of_equals(peaks: UnitPeaks, work: Mapping[str, str]) -> UnitPeaks:
    """Returns the bytes of units, where units with the same work have the most of all of them.

    Args:
        peaks: bytes forward and backward, by unit.
        work: what each unit does, as for `medians_of_equals`.
    """
    most = _most_by((work[name], pair) for name, pair in peaks.bytes.items() if name in work)
    return dataclasses.replace(peaks, bytes={name: most[kind] for name, kind in work.items() if kind in most})


def _medians_by(named: Iterable[tuple[str, Pair]]) -> Times:
    of: dict[str, list[Pair]] = {}
    for name, pair in named:
        of.setdefault(name, []).append(pair)
    return {name: _medians(pairs) for name, pairs in of.items()}


def _medians(pairs: Sequence[Pair]) -> tuple[float, float]:
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def _most_by(named: Iterable[tuple[str, Sequence[int]]]) -> Peaks:
    most: Peaks = {}
    for name, (forward, backward) in named:
        ahead, back = most.get(name, (0, 0))
        most[name] = max(ahead, forward), max(back, backward)
    return most

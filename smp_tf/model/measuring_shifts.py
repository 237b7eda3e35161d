"""Shifts in which the ranks of a host measure: at most as many at the same time as the host has processors.

    four ranks on two processors          three ranks on two
    shift 0   ranks 0 and 1 measure       ranks 0 and 1
    shift 1   ranks 2 and 3               rank 2, and rank 0 again so that rank 2 is not alone

Ranks that take turns on a processor wait in some calls and not in others. Nothing can be read from a few calls then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shifts:
    """When a rank measures.

    Args:
        count: number of shifts, the same on all ranks.
        mine: the shifts in which this rank measures.
        crowd: how many ranks its host has for each processor, at least 1. In a training a task takes so many times as
            long as in a shift.
    """

    count: int = 1
    mine: frozenset[int] = frozenset({0})
    crowd: float = 1.0


def shifts_of(rank: int, hosts: Sequence[str], processors: Sequence[Collection[int]]) -> Shifts:
    """Returns the shifts in which a rank measures.

    Args:
        rank: the rank.
        hosts: host of every rank.
        processors: the processors that every rank may use, by their numbers on its host.

    Example:
        >>> shifts_of(2, ["a"] * 3, [{0, 1}] * 3)
        Shifts(count=2, mine=frozenset({1}), crowd=1.5)
        >>> shifts_of(2, ["a"] * 3, [{0}, {1}, {2}])
        Shifts(count=1, mine=frozenset({0}), crowd=1.0)
    """
    ranks = {host: [r for r, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)}
    at_once = {host: len(set().union(*(processors[r] for r in members))) for host, members in ranks.items()}
    count = max(-(-len(members) // at_once[host]) for host, members in ranks.items())
    here, fit = ranks[hosts[rank]], at_once[hosts[rank]]
    place = here.index(rank)
    mine = frozenset(shift for shift in range(count) if (place - shift * fit) % len(here) < fit)
    return Shifts(count, mine, max(1.0, len(here) / fit))

"""What a placement of units is, and what it costs; the solvers (`solve_chain`, `solve_dag`) look for a good one.

units     a  b  c  d  e             a ─▶ b ─▶ c ─▶ d ─▶ e
stage_of  0  0  1  2  2             times   (3.0, 2.5, 2.8)     seconds per microbatch
owners    {0: 0, 1: 1, 2: 2}        memory  (9e6, 8e6, 9e6)     bytes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smp_tf.partition.cost import Costs, Flow, Stash, Weight
from smp_tf.partition.errors import PlacementError


@dataclass(frozen=True)
class Chain:
    """Units in topological order with everything a placement is costed from.

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
class Ranks:
    """How the ranks that stages run on differ from the machine that costs are for, and from one another.

    Args:
        speed: how fast each computes, in times of that machine.
        link: how fast each sends and receives, in times of that machine's link.
        memory: bytes that each may need, or None.
    """

    speed: tuple[float, ...]
    link: tuple[float, ...]
    memory: tuple[float | None, ...]

    @classmethod
    def alike(cls, count: int, memory_limit: float | None = None) -> Ranks:
        """Ranks that do not differ.

        Args:
            count: how many.
            memory_limit: bytes that each may need, or None.
        """
        return cls((1.0,) * count, (1.0,) * count, (memory_limit,) * count)

    def within(self, memory_limit: float | None) -> Ranks:
        """The same ranks, none of which may need more than a limit.

        Args:
            memory_limit: bytes, or None for no other limit than each has.
        """
        if memory_limit is None:
            return self
        memory = tuple(memory_limit if most is None else min(most, memory_limit) for most in self.memory)
        return dataclasses.replace(self, memory=memory)


@dataclass(frozen=True)
class Placement:
    """Stages for the units of a step.

    Args:
        stage_of: stage of each unit.
        owners: for each variable that units use, the stage that stores it.
        times: seconds of each stage per microbatch, transfers included.
        memory: bytes of each stage.
    """

    stage_of: tuple[int, ...]
    owners: dict[int, int]
    times: tuple[float, ...]
    memory: tuple[float, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """First unit of stage 1, of stage 2 and so on, where every stage is a run of units."""
        return tuple(sum(s < later for s in self.stage_of) for later in range(1, len(self.times)))

    def score(self, objective: str, microbatches: int) -> float:
        """What is to be small: a step's seconds for "speed", the bytes of the fullest stage for "memory"."""
        return step_time(self.times, microbatches) if objective == "speed" else max(self.memory)


def step_time(times: Sequence[float], microbatches: int) -> float:
    """Estimated seconds of a step.

    Args:
        times: seconds of each stage per microbatch.
        microbatches: per step.

    Source:
        Alpa (arXiv 2201.12023), section 5.
    """
    return sum(times) + (microbatches - 1) * max(times)


def in_flight_of(stages: int, microbatches: int, in_flight: Sequence[int] | None) -> tuple[int, ...]:
    """Microbatches whose stash each stage holds at once: what was given, or what 1F1B keeps.

    Args:
        stages: number of stages.
        microbatches: per step.
        in_flight: one number a stage, or None.

    Raises:
        ValueError: there are not as many numbers as stages.
    """
    if in_flight is None:
        return tuple(min(stages - r, microbatches) for r in range(stages))
    if len(in_flight) != stages:
        raise ValueError(f"in_flight must have one entry per stage: received {len(in_flight)} for {stages} stages.")
    return tuple(in_flight)


def costed(
    chain: Chain,
    stage_of: Sequence[int],
    owners: Mapping[int, int],
    microbatches: int,
    in_flight: Sequence[int],
    ranks: Ranks | None = None,
) -> Placement:
    """A placement with what it costs.

    Args:
        chain: the units with their costs.
        stage_of: stage of each; stages may be empty.
        owners: stage that stores each variable; of those that are not here, the stage of the first unit that uses it.
        microbatches: over which the copies of a step are spread.
        in_flight: microbatches whose stash each stage holds at once.
        ranks: how these differ; None where they do not.

    Returns:
        The placement.
    """
    ranks = ranks or Ranks.alike(len(in_flight))
    computing, moved = [0.0] * len(in_flight), [0.0] * len(in_flight)
    memory = [0.0] * len(in_flight)
    for stage, seconds in zip(stage_of, chain.times, strict=True):
        computing[stage] += seconds
    for flow in chain.flows:
        here = stage_of[flow.producer]
        for readers in (
            {stage_of[c] for c in flow.consumers if c > flow.producer},
            {stage_of[c] for c in flow.consumers if c < flow.producer},
        ):
            for stage in (readers | {here}) if readers - {here} else ():
                moved[stage] += flow.nbytes
    for stash in chain.stashes:
        for stage in {stage_of[reader] for reader in stash.readers}:
            memory[stage] += stash.nbytes * in_flight[stage]
    decided = {w.variable: owners.get(w.variable, stage_of[w.users[0]]) for w in chain.weights}
    for weight in chain.weights:
        used = {stage_of[user] for user in weight.users}
        owner = decided[weight.variable]
        memory[owner] += weight.stored - weight.copied
        for stage in used:
            memory[stage] += weight.copied
            if len(used) > 1:
                moved[stage] += (weight.value + (weight.gradient and weight.value)) / microbatches
    times = tuple(
        seconds / speed + nbytes * chain.seconds_per_byte / link
        for seconds, nbytes, speed, link in zip(computing, moved, ranks.speed, ranks.link, strict=True)
    )
    return Placement(tuple(stage_of), decided, times, tuple(memory))


def placed_by_hand(chain: Chain, stages: int) -> list[tuple[int, str]]:
    """Stage and name of the units whose stage is given.

    Args:
        chain: the units.
        stages: number of stages.

    Raises:
        PlacementError: there is no such stage.
    """
    placed = [(stage, name) for stage, name in zip(chain.manual, chain.names, strict=False) if stage is not None]
    for stage, name in placed:
        if not 0 <= stage < stages:
            raise PlacementError(
                f"{name!r} was placed on partition {stage}. There are {stages}: use 0 to {stages - 1}."
            )
    return placed

"""Placements of units, and what each costs. The solvers (`solve_chain`, `solve_dag`) search for a good one.

units     a  b  c  d  e             a ─▶ b ─▶ c ─▶ d ─▶ e
chunk_of  0  0  1  2  2             times   (3.0, 2.5, 2.8)     seconds per microbatch, by stage
owners    {0: 0, 1: 1, 2: 2}        memory  (9e6, 8e6, 9e6)     bytes, by stage

A stage is what one rank runs: one chunk of the units, or several, by a `placement` such as (0, 1, 1, 0).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.units.cost import Costs, Flow, Stash, Weight

#: How many units a message names.
_MOST_NAMES = 6


@dataclass(frozen=True)
class Chain:
    """Units in topological order, with all that the costs of a placement are computed from.

    Args:
        names: of the units, for messages.
        times: seconds of compute of each unit per microbatch, forward and backward.
        flows, stashes, weights: the records of `cost` for these units.
        manual: stage that each unit must be on, or None.
        pinned: chunk that each unit must be in, or None.
        seconds_per_byte: seconds that each end of a message takes for a byte: by the link between two stages, or, where
            it was measured, of a processor.
        bytes_per_message: how many bytes take as long as what every message takes besides.
    """

    names: tuple[str, ...]
    times: tuple[float, ...]
    flows: tuple[Flow, ...] = ()
    stashes: tuple[Stash, ...] = ()
    weights: tuple[Weight, ...] = ()
    manual: tuple[int | None, ...] = ()
    pinned: tuple[int | None, ...] = ()
    seconds_per_byte: float = 0.0
    bytes_per_message: float = 0.0

    @functools.cached_property
    def kept(self) -> dict[Any, object]:
        """What was computed of the chain and is used again, by what it depends on."""
        return {}

    @classmethod
    def of(
        cls, names: Sequence[str], costs: Costs, *, manual: Sequence[int | None] = (), pinned: Sequence[int | None] = ()
    ) -> Chain:
        """Returns the chain of a step's units with their estimated costs."""
        chain = cls(
            names=tuple(names),
            times=tuple(u.seconds.both for u in costs.units),
            flows=costs.flows,
            stashes=costs.stashes,
            weights=costs.weights,
            manual=tuple(manual),
            pinned=tuple(pinned),
            seconds_per_byte=1.0 / costs.machine.link,
        )
        message = costs.machine.message
        if message is None:
            return chain
        byte = message.seconds_per_byte
        return dataclasses.replace(chain, seconds_per_byte=byte, bytes_per_message=message.seconds / byte)

    def bytes_of(self, flow: Flow) -> float:
        """Returns the bytes of a tensor that crosses, with those that take as long as the message itself."""
        return flow.nbytes + self.bytes_per_message

    def bytes_across(self, weight: Weight) -> float:
        """Returns the bytes of a weight that cross once per step to each copy, with those for the messages."""
        return weight.crossing + weight.messages * self.bytes_per_message


@dataclass(frozen=True)
class Ranks:
    """How the ranks of the stages differ from the machine that the costs are for, and from each other.

    Args:
        speed: how fast each rank computes, as a multiple of that machine's speed.
        link: how fast each rank sends and receives, as a multiple of that machine's link.
        memory: bytes that each may need, or None.
        hosts: the number of each rank's host; empty where all are on one host.
        own: bytes that each rank has, or None, whatever `memory_limit` says; empty where nothing is known.
        limited_by: the words for what says how many bytes a rank has.
        rings: how fast the replicas of each stage pass on what they average, as a multiple of that machine's link;
            empty where they do so at its speed.
    """

    speed: tuple[float, ...]
    link: tuple[float, ...]
    memory: tuple[float | None, ...]
    hosts: tuple[int, ...] = ()
    own: tuple[float | None, ...] = ()
    limited_by: tuple[str, ...] = ()
    rings: tuple[float, ...] = ()

    @classmethod
    def alike(cls, count: int, memory_limit: float | None = None) -> Ranks:
        """Returns ranks that do not differ.

        Args:
            count: number of ranks.
            memory_limit: bytes that each may need, or None.
        """
        return cls((1.0,) * count, (1.0,) * count, (memory_limit,) * count)

    def within(self, memory_limit: float | None) -> Ranks:
        """Returns the same ranks with a limit that none may exceed.

        Args:
            memory_limit: bytes, or None for no limit besides each rank's own.
        """
        if memory_limit is None:
            return self
        memory = tuple(memory_limit if most is None else min(most, memory_limit) for most in self.memory)
        return dataclasses.replace(self, memory=memory)

    def is_own_limit(self, stage: int) -> bool:
        """Returns whether a rank is limited by what it has, and not by `memory_limit`.

        Args:
            stage: stage of the rank.
        """
        own = self.own[stage] if self.own else None
        return own is not None and own == self.memory[stage]

    def limit_in_words(self, stage: int) -> str:
        """Returns the words for what says how much the rank of a stage may need.

        Args:
            stage: the stage.
        """
        return self.limited_by[stage] if self.is_own_limit(stage) else "memory_limit"


@dataclass(frozen=True)
class Chunks:
    """Which stage runs which chunk, and for how many microbatches each keeps the stash.

    Args:
        placement: the stage of every chunk.
        moments: for each stage, the moments at which it may hold most. A moment says of how many microbatches the stage
            holds each of its chunks, as `pipeline.stash.stash_profile` gives it.
    """

    placement: tuple[int, ...]
    moments: tuple[tuple[Mapping[int, int], ...], ...]

    @classmethod
    def one_each(cls, in_flight: Sequence[int]) -> Chunks:
        """Returns one chunk on every stage.

        Args:
            in_flight: microbatches whose stash each stage holds at once.
        """
        return cls(tuple(range(len(in_flight))), tuple(({stage: held},) for stage, held in enumerate(in_flight)))

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return len(self.moments)

    @property
    def per_stage(self) -> float:
        """Returns the number of chunks of a stage, on average."""
        return len(self.placement) / self.stages

    @property
    def are_stages(self) -> bool:
        """Returns whether each chunk is a stage of its own, in order."""
        return self.placement == tuple(range(self.stages))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Returns, for each stage, the stashes of all its chunks together when there are most."""
        return tuple(max((sum(held.values()) for held in moments), default=0) for moments in self.moments)

    @property
    def most_of_each(self) -> tuple[int, ...]:
        """Returns the most stashes of each chunk. Different chunks may have most at different moments."""
        return tuple(
            max((held.get(chunk, 0) for held in self.moments[stage]), default=0)
            for chunk, stage in enumerate(self.placement)
        )

    def stash(self, nbytes: Sequence[float]) -> list[float]:
        """Returns the bytes of stash that each stage holds at its fullest.

        Args:
            nbytes: bytes of one microbatch's stash, for each chunk.
        """
        return [
            max((sum(count * nbytes[chunk] for chunk, count in held.items()) for held in moments), default=0.0)
            for moments in self.moments
        ]


@dataclass(frozen=True)
class Placement:
    """Chunks for the units of a step.

    Args:
        chunk_of: chunk of each unit.
        owners: for each variable that units use, the chunk that stores it.
        times: seconds of each stage per microbatch, transfers included.
        memory: bytes of each stage.
        placement: the stage of every chunk; empty where each is a stage of its own.
    """

    chunk_of: tuple[int, ...]
    owners: dict[int, int]
    times: tuple[float, ...]
    memory: tuple[float, ...]
    placement: tuple[int, ...] = ()

    @property
    def stage_of(self) -> tuple[int, ...]:
        """Returns the stage of each unit."""
        return tuple(self.placement[chunk] for chunk in self.chunk_of) if self.placement else self.chunk_of

    @property
    def cuts(self) -> tuple[int, ...]:
        """Returns the first unit of chunk 1, of chunk 2 and so on, where every chunk is a run of units."""
        chunks = len(self.placement or self.times)
        return tuple(sum(c < later for c in self.chunk_of) for later in range(1, chunks))

    def score(self, objective: str, microbatches: int) -> float:
        """Returns what is to be small: a step's seconds for "speed", the fullest stage's bytes for "memory"."""
        if objective == "memory":
            return max(self.memory)
        return step_time(self.times, microbatches, len(self.placement or self.times) / len(self.times))


def step_time(times: Sequence[float], microbatches: int, chunks_per_stage: float = 1.0) -> float:
    """Estimates the seconds of a step.

    Args:
        times: seconds of each stage per microbatch.
        microbatches: per step.
        chunks_per_stage: chunks of a stage. While others wait for the first and the last microbatch, a stage runs one
            of them.

    Source:
        Alpa (arXiv 2201.12023), section 5; with several chunks, Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
    """
    slowest = max(times)
    return microbatches * slowest + (sum(times) - slowest) / chunks_per_stage


def in_flight_of(stages: int, microbatches: int, in_flight: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the microbatches whose stash each stage holds at once: the given numbers, or those of 1F1B.

    Args:
        stages: number of stages.
        microbatches: per step.
        in_flight: one number for each stage, or None.

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
    chunk_of: Sequence[int],
    owners: Mapping[int, int],
    microbatches: int,
    chunks: Chunks,
    ranks: Ranks | None = None,
) -> Placement:
    """Returns a placement with its costs.

    Args:
        chain: the units with their costs.
        chunk_of: chunk of each unit; chunks may be empty.
        owners: chunk that stores each variable. A variable that is not here is stored by the chunk of its first user.
        microbatches: microbatches over which the copies of a step are spread.
        chunks: where the chunks are, and what they keep.
        ranks: how the ranks differ; None where they do not.

    Returns:
        The placement.
    """
    ranks = ranks or Ranks.alike(chunks.stages)
    stage_of = [chunks.placement[chunk] for chunk in chunk_of]
    computing, moved = [0.0] * chunks.stages, [0.0] * chunks.stages
    stashed = [0.0] * len(chunks.placement)
    for stage, seconds in zip(stage_of, chain.times, strict=True):
        computing[stage] += seconds
    for flow in chain.flows:
        here = stage_of[flow.producer]
        for readers in (
            {stage_of[c] for c in flow.consumers if c > flow.producer},
            {stage_of[c] for c in flow.consumers if c < flow.producer},
        ):
            for stage in (readers | {here}) if readers - {here} else ():
                moved[stage] += chain.bytes_of(flow)
    for stash in chain.stashes:
        for chunk in {chunk_of[reader] for reader in stash.readers}:
            stashed[chunk] += stash.nbytes
    memory = chunks.stash(stashed)
    decided = {w.variable: owners.get(w.variable, chunk_of[w.users[0]]) for w in chain.weights}
    for weight in chain.weights:
        used = {stage_of[user] for user in weight.users}
        owner = chunks.placement[decided[weight.variable]]
        memory[owner] += weight.stored - weight.copied
        for stage in used:
            memory[stage] += weight.copied
            if len(used) > 1:
                moved[stage] += chain.bytes_across(weight) / microbatches
    times = tuple(
        seconds / speed + nbytes * chain.seconds_per_byte / link
        for seconds, nbytes, speed, link in zip(computing, moved, ranks.speed, ranks.link, strict=True)
    )
    placement = () if chunks.are_stages else chunks.placement
    return Placement(tuple(chunk_of), decided, times, tuple(memory), placement)


def placed_by_hand(chain: Chain, stages: int) -> list[tuple[int, str]]:
    """Returns the stage and name of the units whose stage is given by hand.

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


def check_units(names: Sequence[str], stages: int) -> None:
    """Refuses more stages than there are units.

    Args:
        names: of the units.
        stages: number of stages.

    Raises:
        PlacementError: some stage would be without a unit.
    """
    count = len(names)
    if stages > count:
        listed = ", ".join(names[:_MOST_NAMES]) + (f", … {count - _MOST_NAMES} more" if count > _MOST_NAMES else "")
        raise PlacementError(
            f"The model has {count} unit{'s' if count != 1 else ''} that can be put on different partitions "
            f"({listed}), and every partition needs at least one. Received: partitions={stages}; the largest possible "
            f"is {count}. Use fewer partitions, or build the model of more layers."
        )

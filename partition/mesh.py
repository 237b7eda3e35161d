"""Tells which rank has which coordinates: stages, replicas, tensor shards and groups. It needs no TensorFlow.

N processes form a mesh of P stages, D replicas and T tensor shards: N = P x D x T. A rank has a coordinate on each of
these axes. Its stage is the coordinate on P, and nothing else. `placement_strategy` says which axis varies fastest
along the world ranks. N = 8, P = 2, T = 1:

    cluster (DPT)                        spread (TPD)

                stage 0  stage 1                     stage 0  stage 1
    replica 0      0        1            replica 0      0        4
    replica 1      2        3            replica 1      1        5
    replica 2      4        5            replica 2      2        6
    replica 3      6        7            replica 3      3        7

A row is one replica (an mp group), a column is one stage in all replicas (a dp group). Where T is 2, both have two
ranks at each place of the table, and an mp_rank is no stage any more.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math

#: The axes of each named placement strategy, from the slowest to the fastest.
STRATEGY_LETTERS = {"cluster": "DPT", "spread": "TPD"}


class CommGroup(enum.Enum):
    """A kind of group. A call that takes one means the group of that kind that this rank is in.

    WORLD has all ranks, MP_GROUP those of this replica, DP_GROUP those that run this rank's partition, PP_GROUP the
    stages of this replica, TP_GROUP those that share a layer (this rank alone, today), RDP_GROUP those that hold the
    same weights. Each is a name of `smp` too, such as `smp.MP_GROUP`.

    Example:
        >>> smp.CommGroup.MP_GROUP is smp.MP_GROUP
        True
    """

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """A kind of rank number: the position of this rank in its group of a kind.

    Example:
        >>> smp.RankType.MP_RANK.group
        <CommGroup.MP_GROUP: 'mp'>
    """

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"

    @property
    def group(self) -> CommGroup:
        """Returns the kind of group whose members this number counts."""
        return CommGroup(self.value)


#: The axes along which the members of a group differ: D for replicas, P for stages, T for tensor shards.
_AXES: dict[CommGroup, str] = {
    CommGroup.WORLD: "DPT",
    CommGroup.MP_GROUP: "PT",
    CommGroup.DP_GROUP: "DT",
    CommGroup.PP_GROUP: "P",
    CommGroup.TP_GROUP: "T",
    CommGroup.RDP_GROUP: "D",
}


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The world as a mesh of stages (P), replicas (D) and tensor shards (T).

    Args:
        world_size: Number of processes.
        stages: Extent of P; with `shards` it divides `world_size`.
        placement_strategy: "cluster", "spread", or the letters D, P and T in some order. The axis of the last
            letter varies fastest along the world ranks.
        shards: Extent of T. The configuration offers 1 only.

    Example:
        >>> mesh = Mesh(8, stages=2, shards=2)
        >>> mesh.extents
        {'D': 2, 'P': 2, 'T': 2}
        >>> mesh.coordinates(6), mesh.members(CommGroup.PP_GROUP, 6)
        ({'T': 0, 'P': 1, 'D': 1}, (4, 6))
    """

    world_size: int
    stages: int
    placement_strategy: str = "cluster"
    shards: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1 or self.shards < 1 or self.world_size % (self.stages * self.shards):
            what = f"{self.stages} partitions"
            if self.shards != 1:
                what += f" of {self.shards} tensor shards"
            raise ValueError(f"{what} do not divide {self.world_size} processes.")

    @property
    def letters(self) -> str:
        """Returns the axes from slowest to fastest, such as "DPT"."""
        return STRATEGY_LETTERS.get(self.placement_strategy, self.placement_strategy)

    @functools.cached_property
    def extents(self) -> dict[str, int]:
        """Returns the size of each axis."""
        return {"D": self.world_size // (self.stages * self.shards), "P": self.stages, "T": self.shards}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the place of a world rank on each axis.

        Args:
            rank: A world rank.
        """
        place: dict[str, int] = {}
        for letter in reversed(self.letters):
            rank, place[letter] = divmod(rank, self.extents[letter])
        return place

    def rank_at(self, stage: int, replica: int = 0, shard: int = 0) -> int:
        """Returns the world rank that has these coordinates.

        Args:
            stage: On P.
            replica: On D.
            shard: On T.
        """
        place, rank = {"P": stage, "D": replica, "T": shard}, 0
        for letter in self.letters:
            rank = rank * self.extents[letter] + place[letter]
        return rank

    def members(self, group: CommGroup, rank: int) -> tuple[int, ...]:
        """Returns the world ranks of a group, in group-rank order.

        Args:
            group: A kind of group.
            rank: A world rank.
        """
        if group is CommGroup.WORLD:
            return tuple(range(self.world_size))
        mine = self.coordinates(rank)
        axes = _AXES[group]
        # The first axis of a group varies slowest: an mp_rank counts the shards of one stage before the next stage.
        number = math.prod(self.extents[axis] for axis in axes)
        found = []
        for left in range(number):
            place = dict(mine)
            for axis in reversed(axes):
                left, place[axis] = divmod(left, self.extents[axis])
            found.append(self.rank_at(place["P"], place["D"], place["T"]))
        return tuple(found)

    def groups(self, group: CommGroup) -> tuple[tuple[int, ...], ...]:
        """Returns all groups of a kind, ordered by their first member.

        Args:
            group: A kind of group.
        """
        return tuple(sorted({self.members(group, rank) for rank in range(self.world_size)}))

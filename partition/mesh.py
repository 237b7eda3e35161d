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

D and T each have two factors: D = outer x inner, T = rows x columns. The second factor varies faster. D = 4 = 2 x 2:

    replica    0  1  2  3
    outer      0  0  1  1      replicas 0 and 2 differ in it alone
    inner      0  1  0  1      replicas 0 and 1 differ in it alone
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math

#: The axes of each named placement strategy, from the slowest to the fastest.
STRATEGY_LETTERS = {"cluster": "DPT", "spread": "TPD"}


class CommGroup(enum.Enum):
    """A kind of group.

    A call that takes one means the group of that kind that this rank is in.

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


class Factor(enum.Enum):
    """A factor of an axis. As a group it means the ranks that differ from one rank in this factor alone.

    Example:
        >>> Factor.INNER.axis
        'D'
    """

    OUTER = "outer"
    INNER = "inner"
    ROW = "row"
    COLUMN = "column"

    @property
    def axis(self) -> str:
        """The axis that it is a factor of."""
        return "D" if self in (Factor.OUTER, Factor.INNER) else "T"


#: The factors of an axis, from the slower to the faster.
_FACTORS = {"D": (Factor.OUTER, Factor.INNER), "T": (Factor.ROW, Factor.COLUMN)}

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
        inner: Extent of the inner factor of D, which it divides. The configuration offers 1 only.
        columns: Extent of the factor of T that varies faster, which divides it. The configuration offers 1 only.

    Example:
        >>> mesh = Mesh(8, stages=2, shards=2)
        >>> mesh.extents
        {'D': 2, 'P': 2, 'T': 2}
        >>> mesh.coordinates(6), mesh.members(CommGroup.PP_GROUP, 6)
        ({'T': 0, 'P': 1, 'D': 1}, (4, 6))
        >>> mesh = Mesh(8, stages=2, inner=2)
        >>> mesh.factors(6)[Factor.OUTER], mesh.factors(6)[Factor.INNER], mesh.members(Factor.INNER, 6)
        (1, 1, (4, 6))
    """

    world_size: int
    stages: int
    placement_strategy: str = "cluster"
    shards: int = 1
    inner: int = 1
    columns: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1 or self.shards < 1 or self.world_size % (self.stages * self.shards):
            what = f"{self.stages} partitions"
            if self.shards != 1:
                what += f" of {self.shards} tensor shards"
            raise ValueError(f"{what} do not divide {self.world_size} processes.")
        for axis, what, size in (("D", "inner replicas", self.inner), ("T", "columns of shards", self.columns)):
            if size < 1 or self.extents[axis] % size:
                whole = "replicas" if axis == "D" else "tensor shards"
                raise ValueError(f"{size} {what} do not divide {self.extents[axis]} {whole}.")

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

    @functools.cached_property
    def factor_extents(self) -> dict[Factor, int]:
        """Returns the size of each factor of D and T."""
        replicas, shards = self.extents["D"], self.extents["T"]
        return {
            Factor.OUTER: replicas // self.inner,
            Factor.INNER: self.inner,
            Factor.ROW: shards // self.columns,
            Factor.COLUMN: self.columns,
        }

    def factors(self, rank: int) -> dict[Factor, int]:
        """Returns the place of a world rank on each factor of D and T.

        Args:
            rank: A world rank.
        """
        place, found = self.coordinates(rank), {}
        for axis, (slow, fast) in _FACTORS.items():
            found[slow], found[fast] = divmod(place[axis], self.factor_extents[fast])
        return found

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

    def members(self, group: CommGroup | Factor, rank: int) -> tuple[int, ...]:
        """Returns the world ranks of a group, in group-rank order.

        Args:
            group: A kind of group, or the factor in which its members differ.
            rank: A world rank.
        """
        if group is CommGroup.WORLD:
            return tuple(range(self.world_size))
        mine = self.coordinates(rank)
        if isinstance(group, Factor):
            axis = group.axis
            _, fast = _FACTORS[axis]
            step = 1 if group is fast else self.factor_extents[fast]
            first = mine[axis] - self.factors(rank)[group] * step
            places = ({**mine, axis: first + number * step} for number in range(self.factor_extents[group]))
            return tuple(self.rank_at(place["P"], place["D"], place["T"]) for place in places)
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

    def groups(self, group: CommGroup | Factor) -> tuple[tuple[int, ...], ...]:
        """Returns all groups of a kind, ordered by their first member.

        Args:
            group: A kind of group, or the factor in which the members of each differ.
        """
        return tuple(sorted({self.members(group, rank) for rank in range(self.world_size)}))

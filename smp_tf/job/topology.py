"""Which rank plays which part: the arithmetic of stages, replicas and groups. No TensorFlow.

N processes, P partitions and D = N / P replicas form a grid. `placement_strategy` says which axis
varies fastest along the world ranks. N = 8, P = 2:

    cluster (DPT)                        spread (TPD)

              mp 0   mp 1                          mp 0   mp 1
    dp 0        0      1                 dp 0        0      4
    dp 1        2      3                 dp 1        1      5
    dp 2        4      5                 dp 2        2      6
    dp 3        6      7                 dp 3        3      7

A row is one replica (an mp group), a column is one stage in all replicas (a dp group).
"""

from __future__ import annotations

import dataclasses
import enum

STRATEGY_LETTERS = {"cluster": "DPT", "spread": "TPD"}


class CommGroup(enum.Enum):
    """A kind of group; a call that takes one means the group of that kind this rank is in.

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
    """What a rank number counts: the position in the group of that kind this rank is in.

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
        """The kind of group whose members this number counts."""
        return CommGroup(self.value)


# The axes along which the members of a group differ: D replicas, P stages, T tensor shards.
_AXES: dict[CommGroup, str] = {
    CommGroup.WORLD: "DPT",
    CommGroup.MP_GROUP: "PT",
    CommGroup.DP_GROUP: "DT",
    CommGroup.PP_GROUP: "P",
    CommGroup.TP_GROUP: "T",
    CommGroup.RDP_GROUP: "D",
}


@dataclasses.dataclass(frozen=True)
class Grid:
    """The world as a grid of replicas (D), stages (P) and tensor shards (T, always 1 today).

    Args:
        world_size: Number of processes.
        partitions: Number of stages; divides `world_size`.
        placement_strategy: "cluster", "spread" or a permutation of the letters D, P and T, of which
            the right-most varies fastest along the world ranks.
    """

    world_size: int
    partitions: int
    placement_strategy: str = "cluster"

    def __post_init__(self) -> None:
        if self.partitions < 1 or self.world_size % self.partitions:
            raise ValueError(f"{self.partitions} partitions do not divide {self.world_size} processes.")

    @property
    def letters(self) -> str:
        """The axes from slowest to fastest, such as "DPT"."""
        return STRATEGY_LETTERS.get(self.placement_strategy, self.placement_strategy)

    @property
    def extents(self) -> dict[str, int]:
        """The size of each axis."""
        return {"D": self.world_size // self.partitions, "P": self.partitions, "T": 1}

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a world rank on each axis."""
        place: dict[str, int] = {}
        extents = self.extents
        for letter in reversed(self.letters):
            rank, place[letter] = divmod(rank, extents[letter])
        return place

    def members(self, group: CommGroup, rank: int) -> tuple[int, ...]:
        """The world ranks of the group of this kind that `rank` is in, in group-rank order."""
        if group is CommGroup.WORLD:
            return tuple(range(self.world_size))
        mine = self.coordinates(rank)
        fixed = [letter for letter in "DPT" if letter not in _AXES[group]]
        inside = [
            other
            for other in range(self.world_size)
            if all(self.coordinates(other)[letter] == mine[letter] for letter in fixed)
        ]
        # Along an axis a rank's number grows with its coordinate, whatever the strategy.
        return tuple(sorted(inside, key=lambda r: [self.coordinates(r)[a] for a in _AXES[group]]))

    def groups(self, group: CommGroup) -> tuple[tuple[int, ...], ...]:
        """All groups of a kind, ordered by their first member."""
        return tuple(sorted({self.members(group, rank) for rank in range(self.world_size)}))


@dataclasses.dataclass(frozen=True)
class Topology:
    """This rank's place in the world.

    Args:
        grid: The world's arithmetic.
        rank: This process's world rank.
        local_rank: Its number among the processes of its host.
        local_size: The number of processes on its host.
        hosts: The host name of every world rank.
        pids: The process id of every world rank, on its host.
    """

    grid: Grid
    rank: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]
    pids: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.grid.world_size

    @property
    def mp_rank(self) -> int:
        """The stage this rank runs."""
        return self.group_rank(CommGroup.MP_GROUP)

    @property
    def mp_size(self) -> int:
        """The number of ranks one replica is split over."""
        return self.group_size(CommGroup.MP_GROUP)

    @property
    def dp_rank(self) -> int:
        """The replica this rank belongs to."""
        return self.group_rank(CommGroup.DP_GROUP)

    @property
    def dp_size(self) -> int:
        """The number of replicas."""
        return self.group_size(CommGroup.DP_GROUP)

    def members(self, group: CommGroup) -> tuple[int, ...]:
        """World ranks of this rank's group of a kind, in group-rank order."""
        return self.grid.members(group, self.rank)

    def group_rank(self, group: CommGroup) -> int:
        """This rank's number within its group of a kind."""
        return self.members(group).index(self.rank)

    def group_size(self, group: CommGroup) -> int:
        """The number of ranks in this rank's group of a kind."""
        return len(self.members(group))

    def world_rank(self, number: int, rank_type: RankType) -> int:
        """The world rank of the process with this number in this rank's group.

        Args:
            number: A number as counted by `rank_type`.
            rank_type: What is counted.

        Raises:
            ValueError: The group has no such member.
        """
        members = self.members(rank_type.group)
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"A rank is an int, not {type(number).__name__} {number!r}.")
        if not 0 <= number < len(members):
            raise ValueError(
                f"There is no {rank_type.name} {number}: this rank's {rank_type.group.name} has "
                f"{len(members)} members, numbered 0 to {len(members) - 1}."
            )
        return members[number]

    def hosts_of_stages(self) -> tuple[int, ...]:
        """A number for the host of each stage of the first replica, like which the others are taken to be laid out."""
        names = [self.hosts[rank] for rank in self.grid.members(CommGroup.PP_GROUP, 0)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return tuple(numbers[name] for name in names)

    def describe(self, rank: int) -> str:
        """Names a rank for a message, such as "rank 3 (host b, pid 117, stage 1 of replica 1)"."""
        place = self.grid.coordinates(rank)
        return (
            f"rank {rank} (host {self.hosts[rank]}, pid {self.pids[rank]}, stage {place['P']} of replica {place['D']})"
        )

"""This rank's place in the world: its coordinates on the mesh, its host and its groups. It needs no TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping

from smp_tf.partition.mesh import CommGroup, Mesh, RankType


@dataclasses.dataclass(frozen=True)
class Topology:
    """This rank's place in the world.

    Args:
        mesh: The mesh of all ranks.
        rank: This process's world rank.
        local_rank: Its number among the processes of its host.
        local_size: The number of processes on its host.
        hosts: The host name of every world rank.
        pids: The process id of every world rank, on its host.
    """

    mesh: Mesh
    rank: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]
    pids: tuple[int, ...]

    @property
    def size(self) -> int:
        """Returns the number of processes."""
        return self.mesh.world_size

    @functools.cached_property
    def place(self) -> Mapping[str, int]:
        """Returns this rank's coordinates, by axis."""
        return types.MappingProxyType(self.mesh.coordinates(self.rank))

    @property
    def stage(self) -> int:
        """Returns the stage that this rank runs, its coordinate on P."""
        return self.place["P"]

    @property
    def stages(self) -> int:
        """Returns the number of stages of a replica."""
        return self.mesh.extents["P"]

    @property
    def replica(self) -> int:
        """Returns the replica that this rank belongs to, its coordinate on D."""
        return self.place["D"]

    @property
    def replicas(self) -> int:
        """Returns the number of replicas."""
        return self.mesh.extents["D"]

    def members(self, group: CommGroup) -> tuple[int, ...]:
        """Returns the world ranks of this rank's group of a kind, in group-rank order."""
        return self.mesh.members(group, self.rank)

    def group_rank(self, group: CommGroup) -> int:
        """Returns this rank's number within its group of a kind."""
        return self.members(group).index(self.rank)

    def group_size(self, group: CommGroup) -> int:
        """Returns the number of ranks in this rank's group of a kind."""
        return len(self.members(group))

    def world_rank(self, number: int, rank_type: RankType) -> int:
        """Returns the world rank of the process with this number in this rank's group.

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
        """Returns a number for the host of each stage of the first replica; the others are taken to be alike."""
        names = [self.hosts[rank] for rank in self.mesh.members(CommGroup.PP_GROUP, 0)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return tuple(numbers[name] for name in names)

    def describe(self, rank: int) -> str:
        """Names a rank for a message, such as "rank 3 (host b, pid 117, stage 1 of replica 1)"."""
        place = self.mesh.coordinates(rank)
        where = f"stage {place['P']} of replica {place['D']}"
        if self.mesh.shards > 1:
            where = f"shard {place['T']} of {where}"
        return f"rank {rank} (host {self.hosts[rank]}, pid {self.pids[rank]}, {where})"

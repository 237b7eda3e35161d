"""A cluster to train a model on, described in a file: what its ranks compute, hold and send.

    hosts:                     # one entry for each kind of host
      - count: 16
        ranks: 8               # processes on each, one a device
        memory: 80GiB          # that a rank may need
        flops: 150e12          # floating-point operations a second that a rank reaches
        memory_bandwidth: 2e12 # bytes a second that a rank reads or writes
    within_host: 300e9         # bytes a second between two ranks of a host
    between_hosts: 25e9        # and of two hosts

Ranks are numbered host by host, as a launcher does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from smp_tf.config.files import nearest, read_mapping
from smp_tf.config.values import RefusedError, byte_count, integer, optional
from smp_tf.errors import ConfigError
from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.units.cost import Machine
from smp_tf.pipeline.programs.prices import ring_seconds

#: The most hosts of one kind, and the most processes on one of them, since every rank is looked at.
_MOST_HOSTS, _MOST_RANKS = 100_000, 1_000


@dataclass(frozen=True)
class Host:
    """A kind of host.

    Args:
        count: how many there are.
        ranks: processes on each.
        memory: bytes that a rank may need, or None for any.
        flops: floating-point operations a second of a rank.
        memory_bandwidth: bytes a second that a rank reads or writes.
        entry: words for where it is described.
    """

    count: int
    ranks: int
    flops: float
    memory_bandwidth: float
    memory: int | None = None
    entry: str = "a host"


@dataclass(frozen=True)
class Cluster:
    """Hosts and what joins them.

    Args:
        hosts: kinds of hosts, in the order of their ranks.
        within_host: bytes a second between two ranks of one host.
        between_hosts: bytes a second between two ranks of different hosts.
    """

    hosts: tuple[Host, ...]
    within_host: float
    between_hosts: float

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return sum(host.count * host.ranks for host in self.hosts)

    @property
    def machine(self) -> Machine:
        """Returns the fastest rank. Others are given as multiples of it."""
        return dataclasses.replace(
            Machine(),
            flops=max(host.flops for host in self.hosts),
            memory=max(host.memory_bandwidth for host in self.hosts),
            link=self.within_host,
        )

    def stages(self, partitions: int, replicas: int) -> Ranks:
        """Returns what stage r of every replica runs on: as fast as its slowest rank, and no larger than the smallest.

        Args:
            partitions: stages of a replica, on ranks one after the other (placement strategy "cluster").
            replicas: number of replicas.

        Raises:
            ConfigError: there are fewer ranks.
        """
        return _stages(self, partitions, replicas)

    def reduce_seconds(self, partitions: int, replicas: int, nbytes: Sequence[float]) -> tuple[float, ...]:
        """Returns the seconds in which the replicas average the gradients of each stage, each in a ring of its own.

        Args:
            partitions: stages of a replica.
            replicas: number of replicas.
            nbytes: bytes of gradients, for each stage.
        """
        rings = _rings(self, partitions, replicas)
        return tuple(ring_seconds(size, replicas, rate) for size, rate in zip(nbytes, rings, strict=True))

    def between(self, host: int, other: int) -> float:
        """Returns the bytes a second between two ranks.

        Args:
            host: number of the host of one rank.
            other: number of the host of the other rank.
        """
        return self.within_host if host == other else self.between_hosts


# A search asks for the same ranks for many microbatches and schedules, and there may be a hundred thousand ranks.
@functools.lru_cache(maxsize=8)
def _stages(cluster: Cluster, partitions: int, replicas: int) -> Ranks:
    rows = _replicas(cluster, partitions, replicas)
    kinds, at = _ranks(cluster)
    fastest = cluster.machine
    speeds = [min(host.flops / fastest.flops, host.memory_bandwidth / fastest.memory) for host in cluster.hosts]
    speed, link, smallest = [], [], []
    for stage in range(partitions):
        ranks = [row[stage] for row in rows]
        # Ranks of a kind come together, so the first one of each kind is enough.
        firsts = {kinds[rank]: rank for rank in reversed(ranks)}
        speed.append(min(speeds[kind] for kind in firsts))
        sizes = [(size, rank) for kind, rank in firsts.items() if (size := cluster.hosts[kind].memory) is not None]
        smallest.append(min(sizes) if sizes else None)
        beside = {
            cluster.between(at[row[stage]], at[row[other]])
            for row in rows
            for other in (stage - 1, stage + 1)
            if 0 <= other < partitions
        }
        link.append(min(beside, default=cluster.within_host) / cluster.within_host)
    memory = tuple(float(least[0]) if least else None for least in smallest)
    limits = [f"memory of {cluster.hosts[kinds[least[1]]].entry}" if least else "" for least in smallest]
    if len({*zip(memory, limits, strict=True)}) > 1:
        limits = [f"{limit}, rank {least[1]}" if least else "" for limit, least in zip(limits, smallest, strict=True)]
    # Only one replica is looked at, since the others are laid out in the same way, or nearly so.
    hosts = tuple(at[rank] for rank in rows[0])
    rings = tuple(rate / cluster.within_host for rate in _rings(cluster, partitions, replicas))
    return Ranks(tuple(speed), tuple(link), memory, hosts, memory, tuple(limits), rings)


@functools.lru_cache(maxsize=8)
def _rings(cluster: Cluster, partitions: int, replicas: int) -> tuple[float, ...]:
    """Returns the bytes a second of the slowest link of the ring of each stage."""
    rows, (_, at) = _replicas(cluster, partitions, replicas), _ranks(cluster)
    rings = ([at[row[stage]] for row in rows] for stage in range(partitions))
    return tuple(min({cluster.between(a, b) for a, b in pairwise([*ring, ring[0]])}) for ring in rings)


def _ranks(cluster: Cluster) -> tuple[list[int], list[int]]:
    """Returns, for every rank, its kind of host and the number of its host."""
    kinds, at, number = [], [], 0
    for kind, host in enumerate(cluster.hosts):
        for _ in range(host.count):
            kinds += [kind] * host.ranks
            at += [number] * host.ranks
            number += 1
    return kinds, at


def _replicas(cluster: Cluster, partitions: int, replicas: int) -> list[range]:
    if partitions * replicas > cluster.size:
        raise ConfigError(
            f"{partitions} partitions and {replicas} replicas need {partitions * replicas} ranks. The cluster has "
            f"{cluster.size}."
        )
    return [range(replica * partitions, (replica + 1) * partitions) for replica in range(replicas)]


def one_host(ranks: int) -> Cluster:
    """Returns the processes like this one, on one host.

    Args:
        ranks: number of processes.
    """
    usual = Machine()
    return Cluster((Host(1, ranks, usual.flops, usual.memory),), usual.link, usual.link)


def read_cluster(file: Path) -> Cluster:
    """Returns the cluster that a YAML or JSON file describes.

    Args:
        file: the file.

    Raises:
        ConfigError: the file cannot be read, or something in it is missing, unknown or of the wrong kind.
    """
    fields = _fields(read_mapping(file), _CLUSTER, f"the file {file}")
    entries = {f"host {n} of the file {file}": host for n, host in enumerate(fields.pop("hosts"))}
    hosts = tuple(Host(**_fields(host, _HOST, entry), entry=entry) for entry, host in entries.items())
    return Cluster(hosts=hosts, **fields)


def _rate(value: Any) -> float:
    """Returns a number of bytes or operations a second. YAML reads 25e9 as a word."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RefusedError from None
    if isinstance(value, bool) or not 1 <= number < float("inf"):
        raise RefusedError
    return number


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RefusedError
    return value


_Checks = Mapping[str, tuple[Callable[[Any], Any], str, bool]]
_RATE = (_rate, "a number of at least 1", True)
_CLUSTER: _Checks = {
    "hosts": (_list, "a list with an entry for each kind of host", True),
    "within_host": _RATE,
    "between_hosts": _RATE,
}
_HOST: _Checks = {
    "count": (integer(1, _MOST_HOSTS), f"an int of 1 to {_MOST_HOSTS}", True),
    "ranks": (integer(1, _MOST_RANKS), f"an int of 1 to {_MOST_RANKS}", True),
    "flops": _RATE,
    "memory_bandwidth": _RATE,
    "memory": (optional(byte_count), 'a number of bytes, such as "80GiB"', False),
}


def _fields(given: Any, checks: _Checks, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{where} must give {', '.join(checks)}. Received: {given!r}.")
    for name in given:
        if name not in checks:
            raise ConfigError(f"{name!r} in {where} is unknown: there are {', '.join(checks)}.{nearest(name, checks)}")
    found = {}
    for name, (check, allowed, needed) in checks.items():
        if name not in given:
            if needed:
                raise ConfigError(f"{name!r} is missing in {where}: {allowed}.")
            continue
        try:
            found[name] = check(given[name])
        except RefusedError:
            raise ConfigError(f"{name!r} in {where} must be {allowed}. Received: {given[name]!r}.") from None
    return found

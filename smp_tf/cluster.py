"""A cluster that a model may be trained on, described in a file: what its ranks compute, hold and send.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from smp_tf.config_file import nearest, read_mapping
from smp_tf.config_values import RefusedError, byte_count, integer, optional
from smp_tf.errors import ConfigError
from smp_tf.partition.cost import Machine
from smp_tf.partition.placement import Ranks

#: Of one kind, and processes on one of them; every rank is looked at.
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
    """

    count: int
    ranks: int
    flops: float
    memory_bandwidth: float
    memory: int | None = None


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
        """Number of ranks."""
        return sum(host.count * host.ranks for host in self.hosts)

    @property
    def machine(self) -> Machine:
        """The fastest rank, in times of which the others are."""
        return dataclasses.replace(
            Machine(),
            flops=max(host.flops for host in self.hosts),
            memory=max(host.memory_bandwidth for host in self.hosts),
            link=self.within_host,
        )

    def stages(self, partitions: int, replicas: int) -> Ranks:
        """What stage r of every replica runs on: as fast as the slowest of its ranks, and no larger than the smallest.

        Args:
            partitions: stages of a replica, on ranks one after the other (placement strategy "cluster").
            replicas: number of replicas.

        Raises:
            ConfigError: there are fewer ranks.
        """
        rows = self._replicas(partitions, replicas)
        kinds, at = self._ranks()
        fastest = self.machine
        speed, link, memory = [], [], []
        for stage in range(partitions):
            here = [kinds[row[stage]] for row in rows]
            speed.append(min(min(k.flops / fastest.flops, k.memory_bandwidth / fastest.memory) for k in here))
            sizes = [kind.memory for kind in here if kind.memory is not None]
            memory.append(float(min(sizes)) if sizes else None)
            beside = [
                self._between(at[row[stage]], at[row[other]])
                for row in rows
                for other in (stage - 1, stage + 1)
                if 0 <= other < partitions
            ]
            link.append(min(beside, default=self.within_host) / self.within_host)
        # Of one replica: the others are laid out as it is, or nearly so.
        return Ranks(tuple(speed), tuple(link), tuple(memory), tuple(at[rank] for rank in rows[0]))

    def reduce_seconds(self, partitions: int, replicas: int, nbytes: Sequence[float]) -> tuple[float, ...]:
        """Seconds in which the replicas average the gradients of each stage, each in a ring of its own.

        Args:
            partitions: stages of a replica.
            replicas: number of replicas.
            nbytes: of gradients, for each stage.

        Source:
            Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
        """
        if replicas == 1:
            return (0.0,) * partitions
        rows, (_, at) = self._replicas(partitions, replicas), self._ranks()
        found = []
        for stage, size in enumerate(nbytes):
            ring = [at[row[stage]] for row in rows]
            slowest = min(self._between(a, b) for a, b in pairwise([*ring, ring[0]]))
            found.append(2 * (replicas - 1) / replicas * size / slowest)
        return tuple(found)

    def _between(self, host: int, other: int) -> float:
        return self.within_host if host == other else self.between_hosts

    def _ranks(self) -> tuple[list[Host], list[int]]:
        """Of every rank, its kind and the number of its host."""
        kinds, at, number = [], [], 0
        for host in self.hosts:
            for _ in range(host.count):
                kinds += [host] * host.ranks
                at += [number] * host.ranks
                number += 1
        return kinds, at

    def _replicas(self, partitions: int, replicas: int) -> list[list[int]]:
        if partitions * replicas > self.size:
            raise ConfigError(
                f"{partitions} partitions and {replicas} replicas need {partitions * replicas} ranks. The cluster has "
                f"{self.size}."
            )
        return [[replica * partitions + stage for stage in range(partitions)] for replica in range(replicas)]


def one_host(ranks: int) -> Cluster:
    """Processes like this one, on one host.

    Args:
        ranks: how many.
    """
    usual = Machine()
    return Cluster((Host(1, ranks, usual.flops, usual.memory),), usual.link, usual.link)


def read_cluster(file: Path) -> Cluster:
    """The cluster that a YAML or JSON file describes.

    Args:
        file: the file.

    Raises:
        ConfigError: it cannot be read, or something in it is missing, unknown or not of its kind.
    """
    fields = _fields(read_mapping(file), _CLUSTER, f"the file {file}")
    hosts = tuple(
        Host(**_fields(host, _HOST, f"host {n} of the file {file}")) for n, host in enumerate(fields.pop("hosts"))
    )
    return Cluster(hosts=hosts, **fields)


def _rate(value: Any) -> float:
    """A number of bytes or operations a second; YAML reads 25e9 as a word."""
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

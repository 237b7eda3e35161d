"""Checks the arguments of `smp-tf plan`, and makes one value of them."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_tf.command.arguments import require_batch_size
from smp_tf.command.output import UsageError, say
from smp_tf.config.config import Config, check_config
from smp_tf.config.text_file import UnreadableError, read_text
from smp_tf.offline.cluster import Cluster, read_cluster
from smp_tf.offline.numbers import counted
from smp_tf.partition.errors import PlacementError
from smp_tf.partition.plan.plan_file import MAX_BYTES, PlanFile
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.schedules.schedule import is_named, runs_on

#: The most partitions, microbatches, replicas and ranks, since they are looked at one by one.
_MOST = 100_000
#: 1 EiB. It is more than any host has, and a plan can still compute with it.
_MOST_BYTES = 2**60


@dataclass(frozen=True)
class Settings:
    """The settings that a plan is asked for.

    Args:
        config: the configuration, as smp.init would take it.
        cluster: the cluster of the ranks; None where none is given.
        stored: the plans of `--partition-file`.
        replicas: number of replicas, where the partitions are given.
        ranks: number of processes; None where none is given.
        is_auto: whether partitions or microbatches are searched for.
        is_any_partitions: whether partitions are searched for.
        schedule_file: the file of a written schedule, which has no name.
    """

    config: Config
    cluster: Cluster | None
    stored: PlanFile | None
    replicas: int
    ranks: int | None
    is_auto: bool
    is_any_partitions: bool
    schedule_file: str | None

    @property
    def processes(self) -> int:
        """Returns how many processes take part."""
        if self.is_any_partitions:
            return self.ranks or 1
        return (self.config.partitions or 1) * self.replicas

    def say_idle(self, partitions: int, replicas: int) -> None:
        """Says how many ranks a plan leaves idle.

        Args:
            partitions: number of partitions of the plan.
            replicas: number of replicas of the plan.
        """
        ranks = self.ranks
        if ranks is None:
            return
        idle = ranks - partitions * replicas
        if not idle:
            return
        taken = f"{counted(partitions, 'partition')} and {counted(replicas, 'replica')} take {ranks - idle}"
        if self.is_any_partitions:
            say(f"{idle} of the {ranks} ranks would be idle: {taken}, and nothing that was tried of all of them fits")
            return
        if ranks % partitions == 0:
            others = counted(ranks // partitions, "replica")
        else:
            fewer = max(count for count in range(1, partitions) if ranks % count == 0)
            more = min(count for count in range(partitions + 1, ranks + 1) if ranks % count == 0)
            others = f"{fewer} or {more} partitions"
        say(f"{idle} of the {ranks} ranks would be idle: {taken}; with {others} none would be")


def settings_of(given: argparse.Namespace) -> Settings:
    """Checks the arguments and puts them together.

    Args:
        given: the command's arguments; what `--partition-file` says of partitions, microbatches, schedule and balance
            is added.

    Raises:
        UsageError: an argument is wrong.
        ConfigError: an argument that smp.init takes, too, is wrong.
    """
    for name in ("partitions", "microbatches", "replicas", "ranks", "chunks_per_rank"):
        value = getattr(given, name)
        if isinstance(value, int) and value > _MOST:
            raise UsageError(f"--{name.replace('_', '-')} is at most {_MOST:,}. Received: {value:,}.")
    stored = _stored(given)
    is_auto = "auto" in (given.partitions, given.microbatches)
    cluster = read_cluster(given.cluster) if given.cluster is not None else None
    replicas = _replicas(given, cluster)
    config = _config(given, cluster, stored)
    if config.memory_limit is not None and config.memory_limit > _MOST_BYTES:
        raise UsageError(f"--memory-limit is at most 1 EiB. Received: {given.memory_limit}.")
    if is_auto and not is_named(config.pipeline):
        raise UsageError("--partitions auto and --microbatches auto try schedules that have a name. Received: a file.")
    require_batch_size(given)
    return Settings(
        config,
        cluster,
        stored,
        replicas,
        ranks=_ranks(given, cluster),
        is_auto=is_auto,
        is_any_partitions=given.partitions == "auto",
        schedule_file=given.pipeline if given.pipeline is not None and not is_named(config.pipeline) else None,
    )


def _config(given: argparse.Namespace, cluster: Cluster | None, stored: PlanFile | None) -> Config:
    usual = "speed" if given.partitions == "auto" or cluster is not None else "memory"
    wanted: dict[str, Any] = {"pipeline": "interleaved", "optimize": usual}
    for name, value in (("partitions", given.partitions), ("microbatches", given.microbatches)):
        if value not in (None, "auto"):
            wanted[name] = value
    planned = ("pipeline", "optimize", "balance_tolerance", "memory_limit", "chunks_per_rank", "gradient_compression")
    for name in planned:
        if getattr(given, name) is not None:
            wanted[name] = getattr(given, name)
    if given.not_contiguous:
        wanted["contiguous"] = False
    for name in ("shard_optimizer_state", "gradient_offload", "optimizer_offload", "recompute"):
        if getattr(given, name):
            wanted[name] = True
    own = stored.plans[0].pipeline if stored is not None else None
    if own == given.pipeline and own is not None and not is_named(own):
        # The tasks of a written schedule, which a .txt file listed when the plan was made.
        return dataclasses.replace(check_config(wanted | {"pipeline": "interleaved"}, "smp-tf plan"), pipeline=own)
    return check_config(wanted, "smp-tf plan")


def _ranks(given: argparse.Namespace, cluster: Cluster | None) -> int | None:
    if given.ranks is not None or cluster is None:
        return given.ranks
    return cluster.size


def _stored(given: argparse.Namespace) -> PlanFile | None:
    """Returns the plans of `--partition-file`, and takes from them the settings that are not given.

    Args:
        given: the command's arguments; what the file says of partitions, microbatches, schedule and balance is added.

    Raises:
        UsageError: the file is no plan file, or the other arguments would make another plan.
    """
    file = given.partition_file
    if file is None:
        if given.partitions is None:
            raise UsageError("Say how many partitions there are to be: --partitions P, or --partition-file FILE.")
        return None
    for option in ("balance_tolerance", "chunks_per_rank", "not_contiguous", "json"):
        value = getattr(given, option)
        if value is not None and value is not False:
            raise UsageError(f"--{option.replace('_', '-')} is for a plan that is made, and --partition-file has one.")
    for option in ("partitions", "microbatches", "pipeline"):
        if getattr(given, option) == "auto":
            raise UsageError(f"--{option} auto makes plans, and --partition-file has one: give a number, or nothing.")
    try:
        found = PlanFile.from_json(read_text(file, MAX_BYTES))
    except FileNotFoundError:
        raise UsageError(f"--partition-file {file} does not exist (looked in {Path.cwd()}).") from None
    except UnreadableError as error:
        raise UsageError(f"--partition-file {file} {error}.") from error
    except PlacementError as error:
        raise UsageError(f"--partition-file {file} is no plan that can be read. {error}") from error
    if not found.plans:
        raise UsageError(f"--partition-file {file} holds no plan.")
    first = found.plans[0]
    try:
        runs_on(first.pipeline, first.placement)
    except ScheduleError as error:
        raise UsageError(f"--partition-file {file} names a pipeline that cannot be had. {error}") from error
    if first.microbatches > _MOST:
        raise UsageError(
            f"--partition-file {file}: 'microbatches' is at most {_MOST:,}. Received: {first.microbatches:,}."
        )
    if given.partitions not in (None, found.partitions):
        raise UsageError(f"--partition-file {file} is for {found.partitions} partitions. Received: {given.partitions}.")
    given.partitions = found.partitions
    for option in ("microbatches", "pipeline", "optimize"):
        if getattr(given, option) is None:
            setattr(given, option, getattr(first, option))
    return found


def _replicas(given: argparse.Namespace, cluster: Cluster | None) -> int:
    """Returns the replicas of a model whose partitions are given.

    Raises:
        UsageError: there are fewer ranks, or nothing says how many there are.
    """
    for name in ("replicas", "ranks"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1. Received: {value}.")
    ranks = _ranks(given, cluster)
    if cluster is not None and ranks is not None and ranks > cluster.size:
        raise UsageError(f"--ranks {ranks} is more than the cluster has: {cluster.size}.")
    if given.partitions == "auto":
        if given.replicas is not None:
            raise UsageError("--partitions auto takes as many replicas as there are ranks for: leave out --replicas.")
        if ranks is None:
            raise UsageError("--partitions auto must know how many processes there are: --ranks N, or --cluster FILE.")
        return 1
    if given.replicas is not None:
        if ranks is not None and given.partitions * given.replicas > ranks:
            raise UsageError(
                f"{counted(given.partitions, 'partition')} and {counted(given.replicas, 'replica')} need "
                f"{given.partitions * given.replicas} ranks. There are {ranks}."
            )
        return int(given.replicas)
    if ranks is None or given.partitions < 1:
        return 1
    if ranks < given.partitions:
        raise UsageError(f"{given.partitions} partitions need as many ranks. There are {ranks}.")
    return int(ranks // given.partitions)

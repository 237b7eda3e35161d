"""The hosts of a job, and how many ranks each may run: from `-H`, a file, Slurm, or this host alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from smp_tf.launch.errors import LaunchError
from smp_tf.launch.slurm import is_slurm_job, slurm_slots

THIS_HOST = "localhost"
_NAME = r"[\w.-]+"
_ENTRY = re.compile(rf"({_NAME}):(\d+)$")
_LINE = re.compile(rf"({_NAME})(?::(\d+)|\s+slots\s*=\s*(\d+))(\s|$)")


@dataclass(frozen=True)
class HostList:
    """The hosts of a job.

    Args:
        slots: how many ranks each host may run, in the order of their ranks.
        source: where they were named, such as "-H host1:4".
        size: how many ranks there are to be.
    """

    slots: Mapping[str, int]
    source: str
    size: int


def choose_hosts(
    size: int | None, hosts: str | None, hostfile: Path | None, environment: Mapping[str, str]
) -> HostList:
    """Returns the hosts of a job. Those that are named come before those of Slurm.

    Args:
        size: number of ranks; None for one in every slot.
        hosts: what `-H` is given.
        hostfile: the file that `--hostfile` names.
        environment: the variables that Slurm sets.

    Raises:
        LaunchError: the hosts cannot be read, or have too few slots.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("-H and --hostfile both name hosts. Give one of them.")
    if size is not None and size < 1:
        raise LaunchError(f"-np must be at least 1. Received: {size}.")
    if hosts is not None:
        slots, source = _of_entries(hosts.split(","), "-H"), f"-H {hosts}"
    elif hostfile is not None:
        slots, source = _of_file(hostfile), f"--hostfile {hostfile}"
    elif is_slurm_job(environment):
        slots, source = slurm_slots(environment), "Slurm"
    elif size is None:
        raise LaunchError("Say how many processes there are to be, such as: smp-tf run -np 2 train.py")
    else:
        return HostList({THIS_HOST: size}, "this host", size)
    there = sum(slots.values())
    if size is not None and size > there:
        raise LaunchError(
            f"{size} ranks are to run, and there are {there} slots ({source}: "
            f"{', '.join(f'{host}:{count}' for host, count in slots.items())}). Name more with "
            f"-H host:slots,... or start fewer with -np."
        )
    return HostList(slots, source, there if size is None else size)


def _of_entries(entries: Iterable[str], option: str) -> dict[str, int]:
    slots: dict[str, int] = {}
    for entry in entries:
        found = _ENTRY.match(entry.strip())
        if found is None:
            raise LaunchError(f"{option} takes hosts with numbers of ranks, host1:4,host2:4. Received: {entry!r}.")
        _add(slots, found[1], int(found[2]), option)
    return slots


def _of_file(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise LaunchError(f"--hostfile {path} cannot be read: {error.strerror}.") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.match(text)
        if found is None:
            raise LaunchError(
                f"--hostfile {path}, line {number}, names no host with its slots, such as `host1 slots=4`. "
                f"Received: {text!r}."
            )
        _add(slots, found[1], int(found[2] or found[3]), f"--hostfile {path}")
    if not slots:
        raise LaunchError(f"--hostfile {path} names no host. A line is like `host1 slots=4`.")
    return slots


def _add(slots: dict[str, int], host: str, count: int, source: str) -> None:
    if host in slots:
        raise LaunchError(f"{source} names host {host} twice. Give it once, with all its slots.")
    if count < 1:
        raise LaunchError(f"{source} gives host {host} no slots. A host has one or more, or is left out.")
    slots[host] = count

"""Whether the ranks of a host have enough of its memory for what is offloaded to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from smp_tf.errors import MemoryLimitError
from smp_tf.partition.plan import Plan, as_bytes
from smp_tf.topology import Topology

#: What a container may use, by the version of the kernel's control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_of_host() -> int:
    """The bytes that the processes of this host may use together: of its memory, or of its container's."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [text for path in _LIMITS if path.exists() and (text := path.read_text().strip()).isdecimal()]
    return min([whole, *map(int, limits)])


def require_host_memory(plan: Plan, topology: Topology, whole: int, *, has_device: bool) -> None:
    """Raise where the gradients, and slots, that ranks keep on this host do not fit there.

    Args:
        plan: with its forecast.
        topology: says which ranks are on this host.
        whole: bytes that they may use together.
        has_device: whether ranks have a device with memory of its own; without, all they store is on the host.

    Raises:
        MemoryLimitError: they need more.
    """
    if not any(row.host_bytes for row in plan.forecast):
        return
    host = topology.hosts[topology.rank]
    needed = {
        rank: row.host_bytes if has_device else row.stored_bytes
        for rank, name in enumerate(topology.hosts)
        if name == host and (row := plan.forecast[topology.grid.coordinates(rank)["P"]])
    }
    if sum(needed.values()) > whole:
        raise MemoryLimitError(_too_much(plan, topology, host, needed, whole))


def _too_much(plan: Plan, topology: Topology, host: str, needed: Mapping[int, int], whole: int) -> str:
    slots = plan.forecast[0].slots_on_host
    what, key = ("gradients and slots", "optimizer_offload") if slots else ("gradients", "gradient_offload")
    ranks = "rank needs" if len(needed) == 1 else f"{len(needed)} ranks need"
    lines = [
        f"{key} keeps {what} in the host's memory, and host {host} has too little: its {ranks} "
        f"{as_bytes(sum(needed.values()), up=True)} of {as_bytes(whole)}."
    ]
    for rank, count in needed.items():
        row = plan.forecast[topology.grid.coordinates(rank)["P"]]
        lines.append(
            f"  {topology.describe(rank)}: {as_bytes(count)} (with gradients {as_bytes(row.gradient_bytes)}"
            + (f", slots {as_bytes(row.slot_bytes)})" if slots else ")")
        )
    others = "more partitions or replicas" if slots else "more partitions"
    lines.append(f"Start fewer ranks on this host, use {others}, or leave {key} out.")
    return "\n".join(lines)

"""Checks whether a host has enough memory for what its ranks offload to it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from smp_tf.errors import MemoryLimitError
from smp_tf.job.topology import Topology
from smp_tf.partition.plan.plan import Plan, as_bytes
from smp_tf.partition.plan.stage_forecast import Use

#: The folder of the kernel's control groups, and the file with what each may use.
_GROUPS = Path("/sys/fs/cgroup")
_LIMIT = "memory.max"


def memory_of_host() -> int:
    """Returns the bytes that the processes of this host, or of this control group, may use together.

    Only control groups of version 2 are looked at.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            own = _GROUPS / path.lstrip("/")
            for group in (own, *own.parents):
                text = (group / _LIMIT).read_text().strip() if (group / _LIMIT).is_file() else ""
                limits += [int(text)] if text.isdecimal() else []
    return min(limits)


def require_host_memory(plan: Plan, topology: Topology, whole: int, *, knows_slots: bool = True) -> None:
    """Raises an error where the gradients and slots that ranks keep on this host do not fit there.

    Args:
        plan: the plan, with its forecast.
        topology: knows which ranks are on this host.
        whole: bytes that these ranks may use together.
        knows_slots: whether the slots are those of a known optimizer. Assumed slots are no reason for an error.

    Raises:
        MemoryLimitError: the ranks need more.
    """
    if not any(row.host_bytes for row in plan.forecast):
        return
    if not knows_slots:
        rows = (row.with_memory({Use.SLOTS: 0}) for row in plan.forecast)
        plan = dataclasses.replace(plan, forecast=tuple(rows))
    host = topology.hosts[topology.rank]
    needed = {
        rank: plan.forecast[topology.mesh.coordinates(rank)["P"]].host_bytes
        for rank, name in enumerate(topology.hosts)
        if name == host
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
        row = plan.forecast[topology.mesh.coordinates(rank)["P"]]
        parts = f"gradients {as_bytes(row.gradient_bytes, up=True)}, slots {as_bytes(row.slot_bytes, up=True)}"
        of = f" ({parts})" if slots else ""
        lines.append(f"  {topology.describe(rank)}: {as_bytes(count, up=True)}{of}")
    others = "more partitions or replicas" if slots else "more partitions"
    lines.append(f"Start fewer ranks on this host, use {others}, or leave {key} out.")
    return "\n".join(lines)

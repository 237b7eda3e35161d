"""Ranks of one host need its memory together for what they keep there."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from smp_tf.errors import MemoryLimitError
from smp_tf.job.topology import Topology
from smp_tf.partition.mesh import Mesh
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.plan.stage_forecast import Use
from smp_tf.planning import host_memory
from smp_tf.planning.host_memory import memory_of_host, require_host_memory
from tests.partition.plan.test_plan import small_plan
from tests.partition.uses_on_host import with_on_host

#: Two replicas of two partitions; stage 1 of the last one is on another host.
TOPOLOGY = Topology(Mesh(4, 2), 0, 0, 3, ("a", "a", "a", "b"), (11, 12, 13, 14))


def offloaded(*, slots: bool) -> Plan:
    """Of each stage, 512 bytes of gradients and 1024 of slots are on the host, or only the former."""
    rows = small_plan().forecast
    kept = (with_on_host(row, *((Use.GRADIENTS, Use.SLOTS) if slots else (Use.GRADIENTS,))) for row in rows)
    return small_plan(forecast=tuple(kept))


def test_what_ranks_keep_on_a_host_is_told_where_it_is_too_much() -> None:
    require_host_memory(offloaded(slots=True), TOPOLOGY, 3 * 1536)
    with pytest.raises(MemoryLimitError) as caught:
        require_host_memory(offloaded(slots=True), TOPOLOGY, 3 * 1536 - 1)
    assert str(caught.value).splitlines() == [
        "optimizer_offload keeps gradients and slots in the host's memory, and host a has too little: its 3 ranks need "
        "4.5 KiB of 4.5 KiB.",
        "  rank 0 (host a, pid 11, stage 0 of replica 0): 1.5 KiB (gradients 512 B, slots 1.0 KiB)",
        "  rank 1 (host a, pid 12, stage 1 of replica 0): 1.5 KiB (gradients 512 B, slots 1.0 KiB)",
        "  rank 2 (host a, pid 13, stage 0 of replica 1): 1.5 KiB (gradients 512 B, slots 1.0 KiB)",
        "Start fewer ranks on this host, use more partitions or replicas, or leave optimizer_offload out.",
    ]


def test_a_host_is_asked_for_what_its_own_ranks_keep() -> None:
    other = dataclasses.replace(TOPOLOGY, rank=3)
    require_host_memory(offloaded(slots=False), other, 512)
    with pytest.raises(
        MemoryLimitError, match=r"gradient_offload keeps gradients .* host b .* rank needs 512 B of 511 B"
    ):
        require_host_memory(offloaded(slots=False), other, 511)


def test_slots_that_are_only_assumed_refuse_nothing() -> None:
    """A training with SGD was refused for the two slots of Adam: a custom loop's optimizer is not known before it."""
    require_host_memory(offloaded(slots=True), TOPOLOGY, 3 * 512, knows_slots=False)
    with pytest.raises(MemoryLimitError):
        require_host_memory(offloaded(slots=True), TOPOLOGY, 3 * 512 - 1, knows_slots=False)


def test_nothing_is_asked_of_a_host_that_nothing_is_offloaded_to() -> None:
    require_host_memory(small_plan(), TOPOLOGY, 0)


@pytest.mark.parametrize(
    ("limits", "wanted"), [({}, None), ({"job": "4096"}, 4096), ({"job/step": "max", "": "8192"}, 8192)]
)
def test_a_control_group_or_one_around_it_limits_the_memory(
    limits: dict[str, str], wanted: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "job" / "step"
    own.mkdir(parents=True)
    for group, limit in limits.items():
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
    real = Path.read_text
    groups = {"/proc/self/cgroup": "1:cpu:/other\n0::/job/step\n"}
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(Path, "read_text", lambda path, *a, **k: groups.get(str(path)) or real(path, *a, **k))
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_of_host() == (whole if wanted is None else wanted)


def test_the_memory_of_this_host_is_at_most_what_it_has() -> None:
    assert 2**28 < memory_of_host() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""`smp.rank()` and its kin on every rank of a mesh, against a table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from smp_tf.job import ranks
from smp_tf.job.topology import Topology
from smp_tf.partition.mesh import Mesh

NAMES = [
    "rank", "size", "local_rank", "local_size", "mp_rank", "mp_size", "dp_rank", "dp_size",
    "pp_rank", "pp_size", "tp_rank", "tp_size", "rdp_rank", "rdp_size", "get_mp_group", "get_dp_group",
]  # fmt: skip

# Six processes on two hosts of three, three partitions; one row a process, one column a name above.
TABLE = [
    (0, 6, 0, 3, 0, 3, 0, 2, 0, 3, 0, 1, 0, 2, [0, 1, 2], [0, 3]),
    (1, 6, 1, 3, 1, 3, 0, 2, 1, 3, 0, 1, 0, 2, [0, 1, 2], [1, 4]),
    (2, 6, 2, 3, 2, 3, 0, 2, 2, 3, 0, 1, 0, 2, [0, 1, 2], [2, 5]),
    (3, 6, 0, 3, 0, 3, 1, 2, 0, 3, 0, 1, 1, 2, [3, 4, 5], [0, 3]),
    (4, 6, 1, 3, 1, 3, 1, 2, 1, 3, 0, 1, 1, 2, [3, 4, 5], [1, 4]),
    (5, 6, 2, 3, 2, 3, 1, 2, 2, 3, 0, 1, 1, 2, [3, 4, 5], [2, 5]),
]


@pytest.mark.parametrize("rank", range(6))
def test_six_processes_three_partitions(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(
        mesh=Mesh(6, 3),
        rank=rank,
        local_rank=rank % 3,
        local_size=3,
        hosts=("a", "a", "a", "b", "b", "b"),
        pids=(1, 2, 3, 4, 5, 6),
    )
    monkeypatch.setattr(ranks, "current", lambda: SimpleNamespace(topology=topology))
    assert dict(zip(NAMES, TABLE[rank], strict=True)) == {name: getattr(ranks, name)() for name in NAMES}

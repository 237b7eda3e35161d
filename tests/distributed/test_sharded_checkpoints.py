"""Checkpoints of replicas that share slots restore on other numbers of replicas, and those of others on them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from smp_tf.checkpoint import files as checkpoint_files
from tests.distributed.harness import Case, CaseResult, launch
from tests.distributed.test_sharded_slots import config
from tests.full_only import params

CHECKPOINTS = "tests.distributed.cases.checkpoints"
#: From and to how many partitions and replicas, and whether these share slots.
RESUMED = {
    "shared to shared": ((2, 2, True), (2, 2, True)),
    "shared to other partitions": ((2, 2, True), (1, 2, True)),
    "shared to other numbers of both": ((2, 2, True), (1, 4, True)),
    "shared to one replica": ((2, 2, True), (2, 1, False)),
    "shared to one process": ((2, 2, True), (1, 1, False)),
    "whole to shared": ((1, 2, False), (1, 2, True)),
    "whole to shared on two partitions": ((2, 2, False), (2, 2, True)),
}


WAYS = list(itertools.product(RESUMED, ("before", "after")))
#: Those that differ most, and when.
RESUMED_QUICKLY = [
    ("shared to other partitions", "after"),
    ("shared to one process", "before"),
    ("whole to shared", "before"),
]


#: How both are trained: in a function, on batches of one shape.
AS_SAVED = {"eager": False, "shapes": "one"}


class Saved:
    """Uninterrupted trainings that save on their way, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[int, int, bool], CaseResult] = {}

    def of(self, source: tuple[int, int, bool]) -> CaseResult:
        """The one on so many partitions and replicas."""
        if source not in self._made:
            partitions, replicas, shared = source
            given = config(partitions, shared, microbatches=4)
            case = Case("saved", "whole", {"folder": self.folder_of(source), "optimizer": "adam", **AS_SAVED}, given)
            self._made[source] = launch(partitions * replicas, CHECKPOINTS, [case])["saved"]
        return self._made[source]

    def folder_of(self, source: tuple[int, int, bool]) -> str:
        """Where it has saved."""
        return str(self._folder / "_".join(map(str, source)))

    def manifest(self, source: tuple[int, int, bool]) -> checkpoint_files.Manifest:
        """Of what it has saved."""
        self.of(source).values()
        return checkpoint_files.read_manifest(self.folder_of(source), "ckpt-1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("shares"))


@pytest.mark.parametrize(("way", "when"), params(WAYS, only_full=set(WAYS) - set(RESUMED_QUICKLY)))
def test_checkpoints_restore_on_other_numbers_of_replicas(way: str, when: str, saved: Saved) -> None:
    source, (partitions, replicas, shared) = RESUMED[way]
    losses = {rank["replica"]: rank["losses"] for rank in saved.of(source).values()}
    arguments = {"folder": saved.folder_of(source), "when": when, **AS_SAVED}
    given = config(partitions, shared, microbatches=4 if replicas < 4 else 2, seed=99)
    [result] = launch(partitions * replicas, CHECKPOINTS, [Case("resumed", "resumed", arguments, given)]).values()
    ranks = result.values()
    for rank in ranks:
        assert rank["read of stages"] == rank["held of stages"]
    if replicas == source[1]:
        for rank in ranks:
            np.testing.assert_allclose(rank["losses"], losses[rank["replica"]], rtol=1e-9)
    # Whatever the masks, which differ between replicas: all that was saved is taken up, by one rank of the stage each.
    slots = [key for rank in ranks for key in rank["held of stages"] if ".OPTIMIZER_SLOT" in key]
    assert len(slots) == len(set(slots)) * (replicas if not shared else 1)
    assert set(slots) == {key for key in saved.manifest(source).tensors if ".OPTIMIZER_SLOT" in key}


def test_parts_of_shares_are_beside_those_of_their_stage(saved: Saved) -> None:
    manifest = saved.manifest((2, 2, True))
    nonce = manifest.parts[0].prefix.rpartition("-")[2]
    assert [part.prefix for part in manifest.parts] == [
        f"mp_rank_0/ckpt-1-{nonce}",
        f"mp_rank_1/ckpt-1-{nonce}",
        f"mp_rank_0/ckpt-1-{nonce}-1",
        f"mp_rank_1/ckpt-1-{nonce}-1",
    ]
    held = {part: {key for key, t in manifest.tensors.items() if t.part == part} for part in range(4)}
    assert all(".OPTIMIZER_SLOT" in key for part in (2, 3) for key in held[part])
    assert manifest.tensors.keys() == saved.manifest((1, 2, False)).tensors.keys()

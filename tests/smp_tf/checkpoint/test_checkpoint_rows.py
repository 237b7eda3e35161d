"""Rows of a slot that replicas have, each some of them, are saved and restored on any number of replicas."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.checkpoint import files, restore
from smp_tf.checkpoint import writing as checkpoint_writing
from smp_tf.checkpoint.manifest import Manifest, StoredTensor
from smp_tf.checkpoint.rotation import Rotation
from smp_tf.checkpoint.survey import Item, StateKind, Survey
from smp_tf.errors import CheckpointError
from smp_tf.job import runtime
from smp_tf.partition.layout import Layout
from smp_tf.partition.spread import EVERYWHERE, SplitOver, Spread, Whole
from smp_tf.sharding import layouts
from smp_tf.variables import step_seeds
from tests.smp_tf.rank_threads import Ranks

KERNEL = "model/kernel"
SLOT = f"{KERNEL}/.OPTIMIZER_SLOT/optimizer/momentums"
NUMBER = f"{KERNEL}/.OPTIMIZER_SLOT/optimizer/scale"
VALUE = np.arange(30, dtype=np.float32).reshape(10, 3)


#: The rows whose slots each replica keeps; None: all, as do the others.
Rows = tuple[tuple[int, int] | None, ...]


class Replicas:
    """Ranks of one stage, whose replicas keep a kernel's slots: one in rows, and a number beside it.

    Args:
        monkeypatch: puts each rank where saving and restoring look for it.
        rows: that they keep.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: Rows) -> None:
        self._rows = rows
        self._ranks = Ranks(monkeypatch, len(rows))
        self._here = threading.local()
        self.surveys: dict[int, Survey] = {}
        monkeypatch.setattr(runtime, "current", self._ranks.current)
        monkeypatch.setattr(step_seeds, "state", dict)
        monkeypatch.setattr(step_seeds, "restore", lambda state: None)
        monkeypatch.setattr(restore, "survey", lambda root: self._here.survey)

    def _survey(self, rank: int, value: Any) -> Survey:
        kernel = Item(KERNEL, StateKind.MODEL, tf.Variable(VALUE), Layout(0, 0))
        found = Survey({KERNEL: kernel}, optimizers={"optimizer": True})
        rows = self._rows[rank]
        if rows is not None and rows[0] == rows[1]:
            return found
        beside = (Layout(0, 0), True, "optimizer", EVERYWHERE if rows is None else Whole("D", rank, len(self._rows)))
        mine = value if rows is None else value[slice(*rows)]
        slot = Item(SLOT, StateKind.SLOT, tf.Variable(mine), *beside, rows=rows, extent=10 if rows else 0)
        found.items |= {SLOT: slot, NUMBER: Item(NUMBER, StateKind.SLOT, tf.Variable(value[1, 0]), *beside)}
        return found

    def save(self, folder: Path) -> list[Any]:
        """Save on all ranks; what each raises, or None."""

        def on(rank: int) -> None:
            writing = checkpoint_writing.Writing(str(folder), "ckpt", "ckpt-1", self._survey(rank, VALUE))
            writing.write_parts()
            writing.commit(Rotation(1, None, 0.0))

        return self._ranks.run(on)

    def restored(self, folder: Path, columns: int = 3) -> list[Any]:
        """Restore on all ranks; the slot that each has then and the number beside it, or what it raises."""
        manifest = files.read_manifest(str(folder), "ckpt-1")

        def on(rank: int) -> Any:
            empty = np.zeros([10, columns], np.float32)
            self._here.survey = self.surveys[rank] = self._survey(rank, empty)
            restore.Restore(None, str(folder), manifest, False).begin()
            items = self._here.survey.items
            return [items[key].target.numpy().tolist() for key in (SLOT, NUMBER) if key in items]

        return self._ranks.run(on)


def stored(folder: Path) -> Any:
    return files.read_manifest(str(folder), "ckpt-1").tensors


CUTS: dict[str, Rows] = {
    "one process": (None,),
    "halves": ((0, 5), (5, 10)),
    "uneven": ((0, 1), (1, 10)),
    "three": ((0, 3), (3, 6), (6, 10)),
    "one without": ((0, 0), (0, 6), (6, 10)),
    "one alone": ((0, 0), (0, 10)),
}


@pytest.mark.parametrize("target", CUTS)
@pytest.mark.parametrize("source", CUTS)
def test_rows_are_restored_on_other_replicas(
    source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Replicas(monkeypatch, CUTS[source])
    assert set(saving.save(tmp_path)) == {None}
    found = Replicas(monkeypatch, CUTS[target]).restored(tmp_path)
    kept = [slice(*(rows or (0, 10))) for rows in CUTS[target]]
    assert found == [[VALUE[rows].tolist(), 3.0] if rows.start < rows.stop else [] for rows in kept]


def test_replicas_that_all_keep_all_take_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Replicas(monkeypatch, ((0, 3), (3, 10))).save(tmp_path)
    assert Replicas(monkeypatch, (None, None)).restored(tmp_path) == [[VALUE.tolist(), 3.0]] * 2


def test_the_manifest_tells_who_has_which_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Replicas(monkeypatch, ((0, 0), (6, 10), (0, 6))).save(tmp_path)
    assert stored(tmp_path) == {
        KERNEL: StoredTensor(0, "float32", (10, 3), "model", 0),
        SLOT: StoredTensor(2, "float32", (10, 3), "slot", 0, "optimizer", ((2, 0, 6), (1, 6, 10))),
        NUMBER: StoredTensor(1, "float32", (), "slot", 0, "optimizer"),
    }


def test_rows_that_one_replica_has_all_are_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Replicas(monkeypatch, CUTS["one alone"]).save(tmp_path)
    assert stored(tmp_path)[SLOT] == StoredTensor(1, "float32", (10, 3), "slot", 0, "optimizer")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (((0, 4), (5, 10)), "no replica has written row 4"),
        (((2, 4), (4, 8)), "no replica has written rows 0 to 1, rows 8 to 9"),
        (((0, 6), (4, 10)), "several have written rows 4 to 5"),
        (((0, 10), (4, 5)), "several have written row 4"),
        (((0, 6), (4, 9)), "no replica has written row 9, and several have written rows 4 to 5"),
        ((None, (4, 6)), "several have written rows 4 to 5"),
        (((0, 3),), "no replica has written rows 3 to 9"),
    ],
)
def test_rows_that_are_missing_or_there_twice_are_refused(
    rows: Rows, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = Replicas(monkeypatch, rows).save(tmp_path)
    for problem in problems:
        assert isinstance(problem, CheckpointError)
        assert f"each of the 10 rows of {SLOT!r} once, but {words}. Apply gradients" in str(problem)
    assert not list(tmp_path.glob("*.json"))


def test_another_shape_of_the_whole_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Replicas(monkeypatch, CUTS["halves"]).save(tmp_path)
    for problem in Replicas(monkeypatch, CUTS["halves"]).restored(tmp_path, columns=4):
        assert f"{SLOT!r} is float32[10, 4] here and float32[10, 3] there" in str(problem)


def test_damage_of_rows_is_told_to_all_before_anything_is_assigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Replicas(monkeypatch, ((0, 4), (4, 10))).save(tmp_path)
    [path] = (tmp_path / "mp_rank_0").glob("*-1.data-*")
    data = bytearray(path.read_bytes())
    at = data.index(VALUE[4:].tobytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    replicas = Replicas(monkeypatch, ((0, 4), (4, 10)))
    for problem in replicas.restored(tmp_path):
        assert f"{SLOT!r} of checkpoint ckpt-1 cannot be read from {path}; the file is damaged." in str(problem)
    assert not any(survey.items[SLOT].target.numpy().any() for survey in replicas.surveys.values())


class TestBeforeThereIsAnOptimizer:
    """Where slots are cut is not known, nor whether they are: replicas look for damage in some rows each."""

    @pytest.fixture(autouse=True)
    def _shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(layouts, "are_shared", lambda: True)
        self.lie(monkeypatch, EVERYWHERE)

    @staticmethod
    def lie(monkeypatch: pytest.MonkeyPatch, slots: Spread) -> None:
        """From now on slots lie so."""
        monkeypatch.setattr(layouts, "slots_of", lambda variable, optimizer: slots)

    @staticmethod
    def looked_at(monkeypatch: pytest.MonkeyPatch, replicas: int, *shape: int) -> list[Any]:
        variable = tf.Variable(tf.zeros([10, 3]))
        stored = StoredTensor(0, "float32", shape or (10, 3), "slot", 0, "optimizer")
        manifest = Manifest("ckpt-1", 0, 1, 1, (), {SLOT: stored})
        found = []
        for replica in range(replicas):
            topology = SimpleNamespace(replica=replica, replicas=replicas)
            monkeypatch.setattr(layouts, "here", lambda replica=replica: {"P": 0, "D": replica, "T": 0})
            monkeypatch.setattr(runtime, "current", lambda topology=topology: SimpleNamespace(topology=topology))
            restoring = restore.Restore(None, "", manifest, False)
            found.append(restoring._slots_to_look_at({KERNEL: variable}, Survey()))
        return found

    def test_all_together_look_at_all_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.looked_at(monkeypatch, 3) == [{SLOT: (0, 3)}, {SLOT: (3, 6)}, {SLOT: (6, 10)}]

    def test_those_without_a_row_look_at_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.looked_at(monkeypatch, 12)
        assert [rows[SLOT] for rows in found if rows] == [(row, row + 1) for row in range(10)]

    def test_what_is_not_of_rows_is_looked_at_by_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.looked_at(monkeypatch, 2, 10, 4) == [{SLOT: None}] * 2

    def test_one_that_keeps_all_looks_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lie(monkeypatch, Whole("D", 0, 1))
        assert self.looked_at(monkeypatch, 1) == [{SLOT: None}]

    def test_those_that_share_nothing_look_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(layouts, "are_shared", lambda: False)
        assert self.looked_at(monkeypatch, 2) == [{SLOT: None}] * 2

    def test_rows_that_are_known_are_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lie(monkeypatch, SplitOver("D", 0, (0, 2, 7, 7, 10)))
        assert self.looked_at(monkeypatch, 4) == [{SLOT: (0, 2)}, {SLOT: (2, 7)}, {}, {SLOT: (7, 10)}]

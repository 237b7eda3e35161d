"""A save that fails leaves nothing of itself and all of what was there, on every rank; other jobs lose nothing."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.checkpoint import files, folder_lock
from smp_tf.checkpoint import tensors as checkpoint_tensors
from smp_tf.checkpoint import writing as checkpoint_writing
from smp_tf.checkpoint.manifest import Manifest
from smp_tf.checkpoint.rotation import Rotation, delete_series
from smp_tf.checkpoint.survey import Item, StateKind, Survey
from smp_tf.errors import CheckpointError, RankMismatchError
from smp_tf.files import durable_files
from smp_tf.job import runtime
from smp_tf.partition.layout import Layout
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.spread import SplitOver, Whole
from smp_tf.variables import assigned_values, step_seeds
from tests.smp_tf.checkpoint.test_checkpoint_cuts import RANKS, save, survey_of
from tests.smp_tf.rank_threads import Ranks

Save = Callable[..., list[str]]


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Save]:
    """Saves on two ranks into tmp_path; what each of them raises, "" for nothing."""
    ranks = Ranks(monkeypatch, RANKS, RANKS)
    monkeypatch.setattr(runtime, "current", ranks.current)
    monkeypatch.setattr(step_seeds, "state", dict)
    monkeypatch.setattr(folder_lock, "_PATIENCE", 0.0)

    def run(name: str, value: int = 0) -> list[str]:
        raised = ranks.run(lambda rank: save(tmp_path, name, rank, value))
        assert all(error is None or isinstance(error, CheckpointError) for error in raised), raised
        return ["" if error is None else str(error) for error in raised]

    yield run
    folder_lock._release_all()


def fill(place: str, folder: Path, patched: pytest.MonkeyPatch) -> None:
    """From now on the disk is full, where it is first noticed at some place."""
    write, sync = checkpoint_tensors.write_part, durable_files.sync
    synced: list[str] = []

    def write_first(directory: str, prefix: str, *args: Any) -> Any:
        part = write(directory, prefix, *args)
        return full() if prefix.startswith("mp_rank_1") else part

    def sync_until(path: str) -> None:
        # The manifest has its place by then.
        if str(path) == str(folder) and not synced:
            synced.append(path)
            full()
        sync(path)

    if place == "a part":
        patched.setattr(checkpoint_tensors, "write_part", write_first)
    elif place == "the manifest":
        patched.setattr(os, "fdopen", lambda descriptor, mode: (os.close(descriptor), full()))
    elif place == "its rename":
        patched.setattr(os, "replace", full)
    else:
        patched.setattr(durable_files, "sync", sync_until)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def latest(folder: Path) -> str:
    """The checkpoint that was saved last, which is whole."""
    manifest = files.listing(str(folder), "ckpt").manifests[-1]
    files.check_files(str(folder), manifest)
    return manifest.name


@pytest.mark.parametrize("name", ["ckpt-1", "ckpt-2"])
@pytest.mark.parametrize("place", ["a part", "the manifest", "its rename", "the folder"])
def test_a_full_disk_leaves_what_was_there_and_nothing_more(
    place: str, name: str, saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved("ckpt-1") == ["", ""]
    before = {file: (tmp_path / file).read_bytes() for file in names(tmp_path)}
    for _ in range(2):
        with monkeypatch.context() as patched:
            fill(place, tmp_path, patched)
            raised = saved(name, 1)
        what = "written" if place == "a part" else "committed"
        rank = 1 if place == "a part" else 0
        expected = f"Checkpoint '{name}' could not be {what}:\nrank {rank} (host host, pid 10{rank}, stage {rank} of "
        assert all(error.startswith(expected) for error in raised), raised
        assert all("[Errno 28] No space left on device" in error for error in raised), raised
        assert {file: (tmp_path / file).read_bytes() for file in names(tmp_path)} == before
    assert saved(name, 1) == ["", ""]
    assert latest(tmp_path) == name
    assert len(names(tmp_path)) == len(before)


def test_what_cannot_be_undone_keeps_its_parts(saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved("ckpt-1") == ["", ""]
    sync = durable_files.sync
    with monkeypatch.context() as patched:
        patched.setattr(durable_files, "sync", lambda path: full() if str(path) == str(tmp_path) else sync(path))
        patched.setattr(os, "remove", full)
        assert all("could not be committed" in error for error in saved("ckpt-2"))
    # Its manifest is there, and names what is there.
    assert latest(tmp_path) == "ckpt-2"


def test_a_rotation_that_fails_is_no_save_that_fails(
    saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saved("ckpt-1") == ["", ""]
    with monkeypatch.context() as patched:
        patched.setattr(os, "remove", full)
        assert saved("ckpt-2") == ["", ""]
    assert latest(tmp_path) == "ckpt-2"
    assert capsys.readouterr().err == (
        f"smp_tf: checkpoint 'ckpt-2' is saved, but of what it replaces in {tmp_path} not all could be deleted, which "
        f"later saves try again. OSError: [Errno 28] No space left on device\n"
    )
    assert saved("ckpt-3") == ["", ""]
    assert [name for name in names(tmp_path) if name.endswith(".json")] == ["ckpt-3.json"]


def test_one_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 4):
        files.commit(str(tmp_path), Manifest(f"ckpt-{number}", number, 1, 1, (), {}))
    remove = os.remove
    monkeypatch.setattr(os, "remove", lambda path: full() if path.endswith("ckpt-1.json") else remove(path))
    with pytest.raises(OSError, match="No space left"):
        Rotation(1, None, 0.0).apply(str(tmp_path), "ckpt")
    assert files.listing(str(tmp_path), "ckpt").names == ("ckpt-1", "ckpt-3")


def test_what_ranks_have_assigned_is_compared_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: in a loop of the script's own that saves checkpoints alone, what one rank set was dropped without a word."""
    ranks = Ranks(monkeypatch, RANKS, RANKS)
    monkeypatch.setattr(runtime, "current", ranks.current)
    monkeypatch.setattr(step_seeds, "state", dict)
    left_out: Any = {"0 net/kernel": (1, "hash", 1)}
    monkeypatch.setattr(assigned_values, "left_out", lambda: left_out if ranks.current().topology.rank == 0 else {})
    raised = ranks.run(lambda rank: save(tmp_path, "ckpt-1", rank, 0))
    folder_lock._release_all()
    words = "'net/kernel': 1 value on rank 0, nothing on rank 1, which stores it"
    assert all(isinstance(error, RankMismatchError) and words in str(error) for error in raised), raised
    assert not [name for name in names(tmp_path) if "ckpt-1" in name]


def test_a_job_that_comes_second_is_refused_before_it_writes(saved: Save, tmp_path: Path) -> None:
    assert saved("ckpt-1") == ["", ""]
    before = names(tmp_path)
    # As another job does: the hold is of this process, not of its threads.
    held = dict(folder_lock._held)
    folder_lock._held.clear()
    raised = saved("ckpt-2")
    assert names(tmp_path) == before
    assert all(f"The folder '{tmp_path}' is in use: the job of host " in error for error in raised)
    assert all(f"(process {os.getpid()}, since " in error for error in raised)
    folder_lock._held.update(held)
    assert saved("ckpt-2") == ["", ""]


@pytest.mark.parametrize("locks", [True, False])
def test_what_killed_jobs_have_left_goes_when_it_is_old(
    locks: bool, saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:
        monkeypatch.setattr(folder_lock, "_lock", lambda *args: False)
    (tmp_path / "mp_rank_0").mkdir()
    old, young = (tmp_path / "mp_rank_0" / f"ckpt-{number}-0123abcd.index" for number in (1, 2))
    for path in (old, young):
        path.touch()
    # Ranks of these tests wait for each other for 20 s. However slow a save is, the young one is younger than that.
    os.utime(old, (old.stat().st_mtime - 21,) * 2)
    os.utime(young, (young.stat().st_mtime + 3600,) * 2)
    assert saved("ckpt-3") == ["", ""]
    assert (old.exists(), young.exists()) == (not locks, True)
    os.utime(young, (young.stat().st_mtime - 3621,) * 2)
    assert saved("ckpt-4") == ["", ""]
    assert (old.exists(), young.exists()) == (not locks, not locks)
    assert latest(tmp_path) == "ckpt-4"


def left_over(folder: Path, seconds: float) -> Path:
    """A part that a killed job has left, so long ago."""
    path = folder / "mp_rank_0" / "ckpt-7-0123abcd.index"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)
    return path


def test_what_cannot_be_deleted_is_in_the_way_of_no_save(
    saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left_over(tmp_path, 21)
    with monkeypatch.context() as patched:
        patched.setattr(os, "remove", full)
        assert saved("ckpt-1") == ["", ""]
    assert latest(tmp_path) == "ckpt-1"
    assert capsys.readouterr().err.startswith(
        f"smp_tf: of what interrupted saves have left in {tmp_path} not all could be deleted, which later saves try "
        f"again. OSError: [Errno 28] No space left on device\n"
    )


@pytest.mark.parametrize("place", ["a part", "the manifest"])
def test_a_save_that_fails_makes_room_for_the_next(
    place: str, saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_over(tmp_path, -3600)
    for seconds in (0, 3621):
        os.utime(left, (left.stat().st_mtime - seconds,) * 2)
        with monkeypatch.context() as patched:
            fill(place, tmp_path, patched)
            assert all("No space left on device" in error for error in saved("ckpt-1"))
        assert left.exists() == (not seconds)


def test_a_job_whose_parts_are_gone_commits_nothing(
    saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved("ckpt-1") == ["", ""]
    write = files.write_file

    def cleaned_before(path: str, content: bytes) -> None:
        for part in tmp_path.glob("mp_rank_1/ckpt-2-*"):
            part.unlink()
        write(path, content)

    monkeypatch.setattr(files, "write_file", cleaned_before)
    assert all("Checkpoint ckpt-2 lacks its file" in error for error in saved("ckpt-2"))
    assert latest(tmp_path) == "ckpt-1"
    assert len(names(tmp_path)) == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix": "../home/thesis"}, "must write 'mp_rank_1/ckpt-1-"),
        ({"prefix": "mp_rank_0/ckpt-1-0123abcd"}, "must write 'mp_rank_1/ckpt-1-"),
        ({"sizes": {"../home/thesis.tex": 3}}, "has files of its own name. Received: '../home/thesis.tex'"),
        ({"sizes": 3}, "wrote something else than a part. 'sizes' of its part must be an object."),
    ],
)
def test_a_rank_that_is_confused_is_named(
    changes: dict[str, Any], words: str, saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_tensors.write_part

    def confused(directory: str, prefix: str, *args: Any) -> Any:
        part = write(directory, prefix, *args)
        return dataclasses.replace(part, **changes) if "mp_rank_1" in prefix else part

    monkeypatch.setattr(checkpoint_tensors, "write_part", confused)
    raised = saved("ckpt-1")
    assert all(words in error for error in raised), raised
    assert names(tmp_path) == [".ckpt.in-use"]


def test_an_interrupt_while_writing_leaves_nothing(
    tmp_path: Path, saved: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    del saved
    write = checkpoint_tensors.write_part

    def interrupted(*args: Any) -> None:
        write(*args)
        raise KeyboardInterrupt

    ranks = Ranks(monkeypatch, 1, 1)
    monkeypatch.setattr(runtime, "current", ranks.current)
    monkeypatch.setattr(checkpoint_tensors, "write_part", interrupted)

    def saving(rank: int) -> None:
        writing = checkpoint_writing.Writing(str(tmp_path), "ckpt", "ckpt-1", survey_of(rank, 0))
        with pytest.raises(KeyboardInterrupt):
            writing.write_parts()

    assert ranks.run(saving) == [None]
    assert names(tmp_path) == [".ckpt.in-use"]


def test_a_series_goes_and_nothing_else(saved: Save, tmp_path: Path) -> None:
    assert saved("ckpt-1") == ["", ""]
    delete_series(str(tmp_path), "ckpt")
    assert not tmp_path.exists()
    assert saved("ckpt-1") == ["", ""]
    (tmp_path / "mp_rank_0" / "best-1-0123abcd.index").touch()
    delete_series(str(tmp_path), "ckpt")
    assert names(tmp_path) == ["mp_rank_0/best-1-0123abcd.index"]
    assert not (tmp_path / "mp_rank_1").exists()


def test_where_a_stage_has_two_shards_each_part_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages, two replicas, two shards: an mp_rank is no stage, and ranks of a stage and a replica are two."""
    ranks = Ranks(monkeypatch, 8, 2, shards=2)
    monkeypatch.setattr(runtime, "current", ranks.current)
    monkeypatch.setattr(step_seeds, "state", dict)
    layouts = {
        "all": Layout(1, 1),
        "slot of one": Layout(1, 1, slots=Whole("D", 1, 2)),
        "rows": Layout(0, 0, slots=SplitOver("D", 0, (0, 1, 3))),
        "shards": Layout(0, 0, slots=SplitOver("T", 0, (0, 2, 3))),
    }
    value = np.array([[1.0], [2.0], [3.0]], np.float32)

    def on(rank: int) -> tuple[int, int]:
        topology = ranks.current().topology
        items = {}
        for key, layout in layouts.items():
            is_here = layout.is_updated_at(layout.slots, topology.place)
            rows = layout.slots.rows_at(topology.place) if is_here else None
            of_rows = {} if rows is None else {"rows": rows, "extent": 3}
            target = tf.Variable(value if rows is None else value[slice(*rows)])
            items[key] = Item(key, StateKind.SLOT, target, layout, is_here, spread=layout.slots, **of_rows)
        writing = checkpoint_writing.Writing(str(tmp_path), "ckpt", "ckpt-1", Survey(items))
        writing.write_parts()
        writing.commit(Rotation(1, None, 0.0))
        return topology.stage, len(topology.members(CommGroup.RDP_GROUP))

    assert ranks.run(on) == [(stage, 2) for stage in (0, 0, 1, 1, 0, 0, 1, 1)]
    folder_lock._release_all()
    manifest = files.read_manifest(str(tmp_path), "ckpt-1")
    assert (manifest.partitions, manifest.replicas) == (2, 2)
    stem = manifest.parts[0].prefix.removeprefix("mp_rank_0/")
    # By rank 0, 2, 1, 4 and 6: the number of a rank within its stage is that of its files.
    names = [f"mp_rank_0/{stem}", f"mp_rank_1/{stem}", f"mp_rank_0/{stem}-1", f"mp_rank_0/{stem}-2"]
    assert [part.prefix for part in manifest.parts] == [*names, f"mp_rank_1/{stem}-2"]
    found = {key: (stored.part, stored.slices) for key, stored in manifest.tensors.items()}
    assert found == {
        "all": (1, ()),
        "slot of one": (4, ()),
        "rows": (0, ((0, 0, 1), (3, 1, 3))),
        "shards": (0, ((0, 0, 2), (2, 2, 3))),
    }
    read = dict(checkpoint_tensors.read_tensors(str(tmp_path), manifest, manifest.tensors))
    assert {key: tensor.numpy().tolist() for key, tensor in read.items()} == dict.fromkeys(layouts, value.tolist())

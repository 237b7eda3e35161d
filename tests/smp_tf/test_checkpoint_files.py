"""A checkpoint is there whole or not at all, and what is damaged is named."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf import checkpoint_files as files
from smp_tf.checkpoint_files import Manifest, StoredTensor
from smp_tf.errors import CheckpointError

VALUES = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b/c": np.array(7, np.int64)}


def save(folder: Path, name: str = "ckpt-1", nonce: str = "0123abcd", values: Any = VALUES, **changes: Any) -> Manifest:
    """Two parts: the first key in one, the others in the other."""
    first, *others = values
    parts, tensors = [], {}
    for number, keys in enumerate([[first], others]):
        prefix = f"mp_rank_{number}/{name}-{nonce}"
        parts.append(files.write_part(str(folder), prefix, {key: tf.constant(values[key]) for key in keys}))
        for key in keys:
            tensors[key] = StoredTensor(number, values[key].dtype.name, values[key].shape, "script")
    sequence = files.listing(str(folder), "ckpt").last_sequence + 1
    manifest = Manifest(name, sequence, 2, 1, tuple(parts), tensors, **changes)
    files.commit(str(folder), manifest)
    return manifest


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = save(tmp_path, optimizers={"optimizer": True}, random={"seed": 3, "steps": {"train/0": 4}})
    assert names(tmp_path) == [
        "ckpt-1.json",
        "mp_rank_0/ckpt-1-0123abcd.data-00000-of-00001",
        "mp_rank_0/ckpt-1-0123abcd.index",
        "mp_rank_1/ckpt-1-0123abcd.data-00000-of-00001",
        "mp_rank_1/ckpt-1-0123abcd.index",
    ]
    read = files.read_manifest(str(tmp_path), "ckpt-1")
    assert len(read.digest) == 64
    assert dataclasses.replace(read, digest="") == written
    files.check_files(str(tmp_path), read)
    found = {key: value.numpy().tolist() for key, value in files.read_tensors(str(tmp_path), read, ["b/c", "a"])}
    assert found == {"a": [[0, 1, 2], [3, 4, 5]], "b/c": 7}


def test_a_part_is_a_tensor_bundle_that_tensorflow_reads(tmp_path: Path) -> None:
    save(tmp_path)
    listed = tf.train.list_variables(str(tmp_path / "mp_rank_0" / "ckpt-1-0123abcd"))
    assert listed == [("a", [2, 3])]


def test_small_tensors_are_read_together_and_large_ones_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"x": np.zeros(1), "a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(100), "d": np.zeros(1)}
    manifest = save(tmp_path, values=values)
    monkeypatch.setattr(files, "_GROUP", 32)
    assert list(files._groups(manifest, ["a", "b", "c", "d", "x"])) == [
        (0, ["x"]),
        (1, ["a", "b"]),
        (1, ["c"]),
        (1, ["d"]),
    ]


class TestListing:
    def test_is_in_the_order_of_saving(self, tmp_path: Path) -> None:
        for number in (10, 9, 2):
            save(tmp_path, f"ckpt-{number}")
        assert files.listing(str(tmp_path), "ckpt").names == ("ckpt-10", "ckpt-9", "ckpt-2")

    def test_holds_no_others(self, tmp_path: Path) -> None:
        save(tmp_path)
        save(tmp_path, "ckpt-2-1")
        (tmp_path / "ckpt-3.json.writing").touch()
        (tmp_path / "ckpt-x.json").touch()
        assert files.listing(str(tmp_path), "ckpt").names == ("ckpt-1",)
        assert files.listing(str(tmp_path), "ckpt-2").names == ("ckpt-2-1",)

    def test_of_no_folder_is_empty(self, tmp_path: Path) -> None:
        found = files.listing(str(tmp_path / "none"), "ckpt")
        assert (found.names, found.last_sequence, found.damaged) == ((), -1, ())

    def test_says_which_manifest_is_damaged(self, tmp_path: Path) -> None:
        save(tmp_path)
        save(tmp_path, "ckpt-2")
        (tmp_path / "ckpt-2.json").write_text("{")
        found = files.listing(str(tmp_path), "ckpt")
        assert (found.names, found.damaged) == (("ckpt-1",), (str(tmp_path / "ckpt-2.json"),))


class TestDeletion:
    def test_takes_the_manifest_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path)
        order = []
        remove = os.remove
        monkeypatch.setattr(os, "remove", lambda path: (order.append(os.path.basename(path)), remove(path)))
        files.delete(str(tmp_path), "ckpt-1")
        assert order[0] == "ckpt-1.json"
        assert names(tmp_path) == []

    def test_of_left_overs_keeps_what_a_manifest_names(self, tmp_path: Path) -> None:
        save(tmp_path)
        kept = [*names(tmp_path), "mp_rank_0/other-1-0123abcd.index", "mp_rank_0/ckpt-1-notes.index", "notes.json"]
        left = [
            "mp_rank_0/ckpt-1-11111111.index",
            "mp_rank_1/ckpt-2-22222222.data-00000-of-00001.tempstate123",
            "ckpt-2.json.writing",
        ]
        for name in (*kept[-3:], *left):
            (tmp_path / name).touch()
        files.clean(str(tmp_path), "ckpt")
        assert names(tmp_path) == sorted(kept)

    def test_of_left_overs_waits_while_a_manifest_is_damaged(self, tmp_path: Path) -> None:
        save(tmp_path)
        (tmp_path / "ckpt-1.json").write_text("{")
        before = names(tmp_path)
        files.clean(str(tmp_path), "ckpt")
        assert names(tmp_path) == before

    def test_of_one_part(self, tmp_path: Path) -> None:
        save(tmp_path)
        files.delete_part(str(tmp_path), "mp_rank_0/ckpt-1-0123abcd")
        assert [name for name in names(tmp_path) if name.startswith("mp_rank_0")] == []
        assert len(names(tmp_path)) == 3


def test_the_same_number_again_replaces_the_manifest_and_touches_no_file_of_the_earlier_one(tmp_path: Path) -> None:
    save(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if "json" not in name}
    save(tmp_path, nonce="ffffffff", values={"a": np.ones(2, np.float32), "b/c": np.array(8, np.int64)})
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    manifest = files.read_manifest(str(tmp_path), "ckpt-1")
    assert dict(files.read_tensors(str(tmp_path), manifest, ["b/c"]))["b/c"].numpy() == 8
    files.clean(str(tmp_path), "ckpt")
    assert not set(before) & set(names(tmp_path))


class TestDamage:
    def test_of_a_manifest(self, tmp_path: Path) -> None:
        save(tmp_path)
        path = tmp_path / "ckpt-1.json"
        whole = path.read_text()
        for damaged in ("", whole[:100], whole.replace("float32", "float16"), "[]", "7"):
            path.write_text(damaged)
            with pytest.raises(
                CheckpointError, match=r"manifest .*ckpt-1.json is damaged or truncated. Restore another"
            ):
                files.read_manifest(str(tmp_path), "ckpt-1")

    def test_a_later_version_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "ckpt-1.json").write_text(json.dumps({"version": 2, "checkpoint": {}}))
        with pytest.raises(
            CheckpointError, match=r"by a later smp_tf, in version 2 of the format; this one reads up to 1"
        ):
            files.read_manifest(str(tmp_path), "ckpt-1")

    def test_of_sizes(self, tmp_path: Path) -> None:
        manifest = save(tmp_path)
        path = tmp_path / "mp_rank_1" / "ckpt-1-0123abcd.data-00000-of-00001"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError) as raised:
            files.check_files(str(tmp_path), manifest)
        assert str(raised.value) == f"The file {path} of checkpoint ckpt-1 has 7 bytes, but was written with 8."
        path.unlink()
        with pytest.raises(CheckpointError) as raised:
            files.check_files(str(tmp_path), manifest)
        assert str(raised.value) == f"Checkpoint ckpt-1 lacks its file {path}: No such file or directory."

    def test_of_an_index(self, tmp_path: Path) -> None:
        manifest = save(tmp_path)
        path = tmp_path / "mp_rank_0" / "ckpt-1-0123abcd.index"
        flip(path, 20)
        with pytest.raises(CheckpointError) as raised:
            files.check_files(str(tmp_path), manifest)
        assert str(raised.value) == f"The file {path} of checkpoint ckpt-1 is damaged: its hash is another."

    def test_of_a_tensor_names_it_and_the_file(self, tmp_path: Path) -> None:
        manifest = save(tmp_path, values={"x": np.zeros(1), "good": np.arange(3.0), "bad": np.arange(4.0)})
        path = tmp_path / "mp_rank_1" / "ckpt-1-0123abcd.data-00000-of-00001"
        flip(path, 3 * 8 + 1)
        files.check_files(str(tmp_path), manifest)
        with pytest.raises(CheckpointError) as raised:
            list(files.read_tensors(str(tmp_path), manifest, ["good", "bad"]))
        assert str(raised.value).startswith(
            f"'bad' of checkpoint ckpt-1 cannot be read from {path}; the file is damaged."
        )
        [(_, good)] = files.read_tensors(str(tmp_path), manifest, ["good"])
        assert good.numpy().tolist() == [0, 1, 2]

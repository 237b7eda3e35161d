"""A checkpoint is there whole or not at all, and what is damaged is named."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.checkpoint import files, leftovers
from smp_tf.checkpoint import manifest as checkpoint_manifest
from smp_tf.checkpoint import tensors as checkpoint_tensors
from smp_tf.checkpoint.manifest import Manifest, StoredTensor
from smp_tf.errors import CheckpointError

VALUES = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b/c": np.array(7, np.int64)}


def save(folder: Path, name: str = "ckpt-1", nonce: str = "0123abcd", values: Any = VALUES, **changes: Any) -> Manifest:
    """Two parts: the first key in one, the others in the other."""
    first, *others = values
    parts, tensors = [], {}
    for number, keys in enumerate([[first], others]):
        prefix = f"mp_rank_{number}/{name}-{nonce}"
        parts.append(
            checkpoint_tensors.write_part(str(folder), prefix, {key: tf.constant(values[key]) for key in keys})
        )
        for key in keys:
            tensors[key] = StoredTensor(number, values[key].dtype.name, values[key].shape, "script")
    sequence = files.listing(str(folder), "ckpt").last_sequence + 1
    manifest = Manifest(name, sequence, 2, 1, tuple(parts), tensors, **changes)
    files.commit(str(folder), manifest)
    return manifest


VERSION_1 = """
{"version": 1, "sha256": "57403b5a1f645b1631fcd2a5ba555eb2a968d08a7db9f0c291a856fd312abc36", "checkpoint": {
 "name": "ckpt-1", "sequence": 0, "partitions": 2, "replicas": 1, "parts": [
  {"prefix": "mp_rank_0/ckpt-1-0123abcd", "sizes": {"mp_rank_0/ckpt-1-0123abcd.index": 7}, "index_hash": "00"}],
 "tensors": {
  "a": {"part": 0, "dtype": "float32", "shape": [2, 3], "kind": "slot", "stage": 1, "optimizer": "optimizer"}},
 "optimizers": {"optimizer": true}, "random": {}, "saved_at": 0.0, "begun": 0.0, "is_kept": false}}
"""
ROWS = np.arange(30.0).reshape(10, 3)


def save_rows(folder: Path, *borders: int, value: Any = ROWS) -> Manifest:
    """A tensor "cut" whose rows between the borders are in a part each, and "whole" in the first part."""
    parts, slices = [], []
    for number, (start, stop) in enumerate(itertools.pairwise(borders)):
        tensors = {"cut": tf.constant(value[start:stop]), **({} if number else {"whole": tf.constant(value)})}
        prefix = f"mp_rank_0/ckpt-1-0123abcd-{number}"
        parts.append(checkpoint_tensors.write_part(str(folder), prefix, tensors, {"cut": (start, stop, len(value))}))
        slices.append((number, start, stop))
    whole = StoredTensor(0, value.dtype.name, value.shape, "slot")
    tensors = {"cut": dataclasses.replace(whole, slices=tuple(slices)), "whole": whole}
    manifest = Manifest("ckpt-1", 0, 1, len(parts), tuple(parts), tensors)
    files.commit(str(folder), manifest)
    return files.read_manifest(str(folder), "ckpt-1")


def read(folder: Path, manifest: Manifest, key: str, *rows: int) -> Any:
    """A tensor, or rows of it."""
    if rows:
        [(found, value)] = checkpoint_tensors.read_rows(str(folder), manifest, {key: rows})
    else:
        [(found, value)] = checkpoint_tensors.read_tensors(str(folder), manifest, [key])
    assert found == key
    return value.numpy()


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
    found = {
        key: value.numpy().tolist() for key, value in checkpoint_tensors.read_tensors(str(tmp_path), read, ["b/c", "a"])
    }
    assert found == {"a": [[0, 1, 2], [3, 4, 5]], "b/c": 7}


def test_a_part_is_a_tensor_bundle_that_tensorflow_reads(tmp_path: Path) -> None:
    save(tmp_path)
    listed = tf.train.list_variables(str(tmp_path / "mp_rank_0" / "ckpt-1-0123abcd"))
    assert listed == [("a", [2, 3])]


def test_small_tensors_are_read_together_and_large_ones_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"x": np.zeros(1), "a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(100), "d": np.zeros(1)}
    manifest = save(tmp_path, values=values)
    monkeypatch.setattr(checkpoint_tensors, "_GROUP", 32)
    assert list(checkpoint_tensors._groups(manifest, ["a", "b", "c", "d", "x"])) == [
        (0, ["x"]),
        (1, ["a", "b"]),
        (1, ["c"]),
        (1, ["d"]),
    ]


class TestRows:
    def test_are_put_together(self, tmp_path: Path) -> None:
        manifest = save_rows(tmp_path, 0, 4, 5, 10)
        files.check_files(str(tmp_path), manifest)
        found = dict(checkpoint_tensors.read_tensors(str(tmp_path), manifest, ["cut", "whole"]))
        np.testing.assert_array_equal(found["cut"], ROWS)
        np.testing.assert_array_equal(found["whole"], ROWS)

    @pytest.mark.parametrize(
        ("first", "last"), [(0, 4), (4, 5), (1, 3), (5, 6), (9, 10), (3, 5), (3, 7), (0, 5), (0, 10)]
    )
    def test_are_read_from_slices_and_from_a_whole(self, first: int, last: int, tmp_path: Path) -> None:
        manifest = save_rows(tmp_path, 0, 4, 5, 10)
        for key in ("cut", "whole"):
            np.testing.assert_array_equal(read(tmp_path, manifest, key, first, last), ROWS[first:last])

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint16", "int8", "complex64", "bool"])
    @pytest.mark.parametrize("shape", [[10], [10, 2, 1]])
    def test_may_be_of_any_dtype_and_rank(self, dtype: str, shape: list[int], tmp_path: Path) -> None:
        numbers = np.arange(np.prod(shape)).reshape(shape)
        value = numbers % 2 == 0 if dtype == "bool" else numbers.astype(tf.as_dtype(dtype).as_numpy_dtype)
        manifest = save_rows(tmp_path, 0, 4, 10, value=value)
        for rows in ((), (1, 3), (3, 5)):
            expected = value[slice(*rows)] if rows else value
            for key in ("cut", "whole"):
                np.testing.assert_array_equal(read(tmp_path, manifest, key, *rows), expected)

    def test_are_read_only_where_they_are(self, tmp_path: Path) -> None:
        manifest = save_rows(tmp_path, 0, 4, 10)
        (tmp_path / "mp_rank_0" / "ckpt-1-0123abcd-0.index").unlink()
        np.testing.assert_array_equal(read(tmp_path, manifest, "cut", 4, 9), ROWS[4:9])

    def test_keep_no_memory_but_their_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        manifest = save_rows(tmp_path, 0, 10, value=np.arange(80.0).reshape(10, 8))
        pieces: list[tf.Tensor] = []
        reading = checkpoint_tensors._read

        def noted(*args: Any) -> list[tf.Tensor]:
            pieces.extend(reading(*args))
            return pieces

        monkeypatch.setattr(checkpoint_tensors, "_read", noted)
        [(_, rows)] = checkpoint_tensors.read_rows(str(tmp_path), manifest, {"whole": (0, 8)})
        [piece] = pieces
        assert np.shares_memory(memoryview(piece), memoryview(piece[:8]))
        assert not np.shares_memory(memoryview(piece), memoryview(rows))

    def test_of_a_part_are_slices_that_tensorflow_reads(self, tmp_path: Path) -> None:
        save_rows(tmp_path, 0, 4, 10)
        prefix = str(tmp_path / "mp_rank_0" / "ckpt-1-0123abcd-1")
        assert tf.train.list_variables(prefix) == [("cut", [10, 3])]
        [found] = tf.raw_ops.RestoreV2(
            prefix=prefix, tensor_names=["cut"], shape_and_slices=["10 3 4,6:-"], dtypes=[tf.float64]
        )
        np.testing.assert_array_equal(found, ROWS[4:])

    def test_all_of_them_in_one_part_are_a_whole(self, tmp_path: Path) -> None:
        tensors = {"a": tf.constant(ROWS)}
        rows = checkpoint_tensors.write_part(str(tmp_path), "mp_rank_0/ckpt-1-0123abcd", tensors, {"a": (0, 10, 10)})
        assert (
            rows.index_hash
            == checkpoint_tensors.write_part(str(tmp_path), "mp_rank_0/ckpt-2-0123abcd", tensors).index_hash
        )

    def test_that_are_damaged_are_named_with_their_file(self, tmp_path: Path) -> None:
        manifest = save_rows(tmp_path, 0, 4, 10)
        path = tmp_path / "mp_rank_0" / "ckpt-1-0123abcd-1.data-00000-of-00001"
        flip(path, 5 * 3 * 8)
        for rows in ((), (3, 5)):
            with pytest.raises(CheckpointError) as raised:
                read(tmp_path, manifest, "cut", *rows)
            assert str(raised.value).startswith(
                f"'cut' of checkpoint ckpt-1 cannot be read from {path}; the file is damaged."
            )
        np.testing.assert_array_equal(read(tmp_path, manifest, "cut", 1, 4), ROWS[1:4])


class TestVersions:
    def test_a_manifest_with_slices_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        read = save_rows(tmp_path, 0, 4, 10)
        assert read.tensors == {
            "cut": StoredTensor(0, "float64", (10, 3), "slot", slices=((0, 0, 4), (1, 4, 10))),
            "whole": StoredTensor(0, "float64", (10, 3), "slot"),
        }
        assert json.loads((tmp_path / "ckpt-1.json").read_text())["version"] == 2

    def test_one_with_slices_is_refused_by_what_does_not_know_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_rows(tmp_path, 0, 4, 10)
        monkeypatch.setattr(checkpoint_manifest, "VERSION", 1)
        checkpoint_manifest.decoded.cache_clear()
        with pytest.raises(CheckpointError, match=r"by a later smp_tf, in version 2 of the format"):
            files.read_manifest(str(tmp_path), "ckpt-1")

    def test_one_without_is_as_it_was_before_there_were_slices(self, tmp_path: Path) -> None:
        save(tmp_path)
        path = tmp_path / "ckpt-1.json"
        content = json.loads(path.read_text())
        assert content["version"] == 1
        described = {"part": 1, "dtype": "int64", "shape": [], "kind": "script", "stage": None, "optimizer": ""}
        assert content["checkpoint"]["tensors"]["b/c"] == described
        # As it was written when smp_tf knew no slices.
        path.write_text(VERSION_1)
        read = files.read_manifest(str(tmp_path), "ckpt-1")
        assert read.tensors == {"a": StoredTensor(0, "float32", (2, 3), "slot", 1, "optimizer")}


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
        kept += ["ckpt-2.writing", ".writing-0123456789abcdef-other-2.json", ".writing-0123456789abcdef-trained"]
        left = [
            "mp_rank_0/ckpt-1-11111111.index",
            "mp_rank_1/ckpt-2-22222222.data-00000-of-00001.tempstate123",
            "ckpt-2.json.writing",
            ".writing-0123456789abcdef-ckpt-2.json",
        ]
        for name in (*kept[-6:], *left):
            (tmp_path / name).touch()
        leftovers.clean(str(tmp_path), "ckpt", math.inf)
        assert names(tmp_path) == sorted(kept)

    def test_of_left_overs_waits_until_nobody_has_written_to_the_save_for_long(self, tmp_path: Path) -> None:
        old = ["mp_rank_0/ckpt-1-11111111.index", ".writing-0123456789abcdef-ckpt-1.json"]
        # The second rank still writes.
        young = ["mp_rank_0/ckpt-2-22222222.index", "mp_rank_1/ckpt-2-22222222-1.data-00000-of-00001.tempstate123"]
        for number in range(2):
            (tmp_path / f"mp_rank_{number}").mkdir()
        for name in (*old, *young):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (100.0, 200.0 if name == young[1] else 100.0))
        leftovers.clean(str(tmp_path), "ckpt", 100.0)
        assert len(names(tmp_path)) == 4
        leftovers.clean(str(tmp_path), "ckpt", 200.0)
        assert names(tmp_path) == sorted(young)

    def test_of_left_overs_goes_through_no_link(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "ckpt-1-11111111.index").touch()
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "mp_rank_0").symlink_to(tmp_path / "outside")
        leftovers.clean(str(tmp_path / "saved"), "ckpt", math.inf)
        assert names(tmp_path / "outside") == ["ckpt-1-11111111.index"]

    def test_of_left_overs_waits_while_a_manifest_is_damaged(self, tmp_path: Path) -> None:
        save(tmp_path)
        (tmp_path / "ckpt-1.json").write_text("{")
        before = names(tmp_path)
        leftovers.clean(str(tmp_path), "ckpt", math.inf)
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
    assert dict(checkpoint_tensors.read_tensors(str(tmp_path), manifest, ["b/c"]))["b/c"].numpy() == 8
    leftovers.clean(str(tmp_path), "ckpt", math.inf)
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
        (tmp_path / "ckpt-1.json").write_text(json.dumps({"version": 3, "checkpoint": {}}))
        with pytest.raises(
            CheckpointError, match=r"by a later smp_tf, in version 3 of the format; this one reads up to 2"
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
            list(checkpoint_tensors.read_tensors(str(tmp_path), manifest, ["good", "bad"]))
        assert str(raised.value).startswith(
            f"'bad' of checkpoint ckpt-1 cannot be read from {path}; the file is damaged."
        )
        [(_, good)] = checkpoint_tensors.read_tensors(str(tmp_path), manifest, ["good"])
        assert good.numpy().tolist() == [0, 1, 2]

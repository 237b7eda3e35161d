"""A manifest names the files of its own save and no others, whoever wrote it: nothing else is ever deleted or read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from smp_tf.checkpoint import files
from smp_tf.checkpoint import tensors as checkpoint_tensors
from smp_tf.checkpoint.manifest import _DTYPES, Manifest, Part, StoredTensor, decoded, encoded
from smp_tf.checkpoint.rotation import Rotation
from smp_tf.errors import CheckpointError

PREFIX = "mp_rank_0/ckpt-1-0123abcd"
TENSOR = StoredTensor(0, "float32", (3,), "script")
STORED = Path(__file__).with_name("stored_checkpoints")


def part(prefix: str = PREFIX, sizes: dict[str, int] | None = None) -> Part:
    return Part(prefix, {f"{prefix}.index": 1} if sizes is None else sizes, "")


def manifest(*parts: Part, **tensors: StoredTensor) -> Manifest:
    return Manifest("ckpt-1", 0, 1, 1, parts, tensors)


def put(folder: Path, changed: Any, name: str = "ckpt-1") -> None:
    """A manifest whose hash is right, whatever it holds."""
    content = json.loads(encoded(manifest(part(), a=TENSOR)))["checkpoint"]
    content = changed(content) if callable(changed) else changed
    digest = files.hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    written = {"version": 1, "sha256": digest, "checkpoint": content}
    (folder / f"{name}.json").write_text(json.dumps(written))


def refused(folder: Path, name: str = "ckpt-1") -> str:
    with pytest.raises(CheckpointError) as raised:
        files.read_manifest(str(folder), name)
    start, end = (
        f"The checkpoint's manifest {folder / name}.json is not one that smp_tf has written there. ",
        " Restore an",
    )
    assert str(raised.value).startswith(start)
    assert files.listing(str(folder), "ckpt").damaged == (str(folder / f"{name}.json"),)
    return str(raised.value)[len(start) :].partition(end)[0]


def test_every_dtype_of_tensorflow_that_a_file_can_hold_is_known_without_it() -> None:
    dtypes = {value.base_dtype.name for value in vars(tf.dtypes).values() if isinstance(value, tf.DType)}
    assert dtypes - {"resource"} <= _DTYPES
    assert [name for name in _DTYPES if tf.as_dtype(name).name != name] == []


@pytest.mark.parametrize(
    "prefix",
    [
        "../home/thesis",
        "/etc/passwd",
        "mp_rank_0/../../home/ckpt-1-0123abcd",
        "mp_rank_0/ckpt-2-0123abcd",
        "mp_rank_0/ckpt-1-0123abcd/",
        "mp_rank_0/ckpt-1",
        "mp_rank_٣/ckpt-1-0123abcd",
        "ckpt-1-0123abcd",
        "mp_rank_0/ckpt-1-0123abcd\n",
        "../" * 100,
        "",
    ],
)
def test_a_prefix_of_other_files_is_refused(prefix: str, tmp_path: Path) -> None:
    put(tmp_path, lambda content: {**content, "parts": [dataclasses.asdict(part(prefix))]})
    assert repr(prefix) in refused(tmp_path)
    # Nor is one written that another rank has said.
    with pytest.raises(CheckpointError, match="The prefix of a part"):
        files.commit(str(tmp_path), manifest(part(prefix)))


def test_a_long_name_is_not_told_whole(tmp_path: Path) -> None:
    put(tmp_path, lambda content: {**content, "parts": [dataclasses.asdict(part("../" * 1000))]})
    assert len(refused(tmp_path)) <= 501


@pytest.mark.parametrize("file", ["../thesis.tex", f"{PREFIX}.index/..", f"{PREFIX}.json", f"{PREFIX}-1.index", "a"])
def test_sizes_of_other_files_are_refused(file: str, tmp_path: Path) -> None:
    put(tmp_path, lambda content: {**content, "parts": [dataclasses.asdict(part(sizes={file: 3}))]})
    assert refused(tmp_path) == f"The part {PREFIX!r} has files of its own name. Received: {file!r}."


def test_a_copy_under_another_name_is_refused(tmp_path: Path) -> None:
    put(tmp_path, lambda content: content, name="ckpt-3")
    assert refused(tmp_path, "ckpt-3") == "It is of 'ckpt-1', and its file's name must be that."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence": "3"}, "'sequence' of the manifest must be a whole number. Received: the text \"3\"."),
        ({"parts": {}}, "'parts' of the manifest must be a list. Received: an object."),
        ({"parts": [3]}, "Entry 1 of 'parts' of the manifest must be an object. Received: the number 3."),
        ({"tensors": {"a": None}}, "'a' in 'tensors' of the manifest must be an object. Received: nothing."),
        ({"random": {"seed": []}}, "'random' of the manifest must have the fields 'seed', 'steps'. Missing: 'steps'."),
        ({"more": 1}, "The manifest must have the fields "),
        ({"parts": []}, "'a' must lie in the 0 parts, each of its rows once."),
    ],
)
def test_fields_of_another_kind_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    put(tmp_path, lambda content: {**content, **changes})
    assert refused(tmp_path).startswith(words)


@pytest.mark.parametrize(
    "tensor",
    [
        {"part": 1},
        {"part": -1},
        {"shape": [-3]},
        {"dtype": "float33"},
        {"slices": [[0, 0, 2], [1, 2, 3]]},
        {"slices": [[0, 0, 2]]},
        {"slices": [[0, 1, 3]]},
        {"slices": [[0, 0]]},
        {"slices": [[0, 0, 3]], "shape": []},
    ],
)
def test_a_tensor_that_is_nowhere_is_refused(tensor: dict[str, Any], tmp_path: Path) -> None:
    described = {**dataclasses.asdict(TENSOR), **tensor}
    put(tmp_path, lambda content: {**content, "tensors": {"a": described}})
    assert "'a'" in refused(tmp_path)


@pytest.mark.parametrize("content", [None, [], {}, 7, "[" * 100_000])
def test_whatever_stands_there_is_an_error_in_words(content: Any, tmp_path: Path) -> None:
    put(tmp_path, content)
    refused(tmp_path)
    (tmp_path / "ckpt-1.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is damaged or truncated"):
        files.read_manifest(str(tmp_path), "ckpt-1")


@given(
    prefix=st.lists(st.sampled_from([*"./-09af\n", "..", "mp_rank_0", "ckpt-1", "0123abcd"]), max_size=8).map("".join)
    | st.text(max_size=20),
    file=st.sampled_from(["", ".index", ".data-00000-of-00001", "/../x", "\n"]) | st.text(max_size=8),
)
def test_whatever_is_read_stays_in_the_folder(prefix: str, file: str) -> None:
    wanted = manifest(part(prefix, {f"{prefix}.index": 1, f"{prefix}{file}": 1}))
    try:
        read = decoded(encoded(wanted).decode(), "/folder/ckpt-1.json")
    except CheckpointError:
        return
    [found] = read.parts
    folder, _, base = found.prefix.partition("/")
    assert folder.startswith("mp_rank_")
    assert base.startswith("ckpt-1-")
    assert "/" not in base
    assert all(name.startswith(f"{found.prefix}.") and name.count("/") == 1 for name in found.sizes)


@pytest.mark.parametrize("way", ["path", "link"])
def test_rotation_deletes_nothing_outside(way: str, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "checkpoints"
    folder.mkdir()
    home.mkdir()
    prefix = "../home/thesis" if way == "path" else PREFIX
    for end in ("index", "tex"):
        (home / f"{prefix.rpartition('/')[2]}.{end}").write_text("text")
    if way == "path":
        put(folder, lambda content: {**content, "parts": [dataclasses.asdict(part(prefix))]})
    else:
        (folder / "mp_rank_0").symlink_to(home)
        put(folder, lambda content: content)
    files.commit(str(folder), Manifest("ckpt-2", 1, 1, 1, (), {}))
    if way == "path":
        Rotation(1, None, 0.0).apply(str(folder), "ckpt")
    else:
        with pytest.raises(CheckpointError, match=r"leads through .*mp_rank_0', a symbolic link"):
            Rotation(1, None, 0.0).apply(str(folder), "ckpt")
    assert len(list(home.iterdir())) == 2


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mp_rank_0").symlink_to(tmp_path / "home")
    with pytest.raises(CheckpointError, match="a symbolic link, which may leave"):
        checkpoint_tensors.write_part(str(tmp_path / "checkpoints"), PREFIX, {"a": np.zeros(2)})
    assert list((tmp_path / "home").iterdir()) == []


def test_checkpoints_of_the_version_before_are_read() -> None:
    expected = {
        "ckpt-1": {"value": 7, "save_counter": 1, "more/0": [1.0, 2.0, 3.0]},
        "rows-1": dict.fromkeys(("cut", "whole"), np.arange(30.0).reshape(10, 3).tolist()),
    }
    for name, values in expected.items():
        read = files.read_manifest(str(STORED), name)
        files.check_files(str(STORED), read)
        tensors = checkpoint_tensors.read_tensors(str(STORED), read, read.tensors)
        assert {key: value.numpy().tolist() for key, value in tensors} == values

"""A file that is noted is the same when it is read, by what its file system can say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smp_tf.errors import CheckpointError
from smp_tf.files import mounts
from smp_tf.files.noted_files import NotedFiles


def replace(path: Path) -> None:
    """Another file of the same size and time."""
    before = path.stat()
    other = path.with_name("other")
    other.write_text("new")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(("kind", "is_told"), [("ext4", True), ("fuse.gcsfuse", False), ("", True)])
def test_the_number_of_a_file_counts_where_it_lasts(
    kind: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    device = path.stat().st_dev
    table = tmp_path / "mounts"
    if kind:
        place = f"{os.major(device)}:{os.minor(device)}"
        table.write_text(f"36 35 {place} / /mnt rw,noatime master:1 - {kind} bucket rw\n")
    monkeypatch.setattr(mounts, "_TABLE", str(table))
    noted = NotedFiles(str(path))
    replace(path)
    if is_told:
        with pytest.raises(CheckpointError, match="was replaced, changed or deleted between load_weights"):
            noted.read(path.read_text)
    else:
        assert noted.read(path.read_text) == "new"
        path.write_text("longer")
        with pytest.raises(CheckpointError, match="was replaced, changed or deleted between load_weights"):
            noted.read(path.read_text)

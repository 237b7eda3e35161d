"""`restore(fall_back=True)` takes the newest checkpoint that is whole, and names what it has left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf.errors import CheckpointError


@pytest.fixture(autouse=True)
def _init(init: Callable[..., None]) -> None:
    init()


class Saved:
    """Three checkpoints of a number, 1 to 3, and a manager that restores them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, tf.Variable(0)
        checkpoint = tf.train.Checkpoint(number=self.number, rest=tf.Variable(tf.zeros([1000])))
        self.manager = smp.CheckpointManager(checkpoint, folder)
        for number in (1, 2, 3):
            self.number.assign(number)
            self.manager.save()
        self.number.assign(0)

    def damage(self, pattern: str, at: int | None = 300) -> Path:
        """Flips a bit of a file, or cuts it short."""
        [path] = self.folder.glob(pattern)
        data = bytearray(path.read_bytes())
        if at is None:
            del data[-1]
        else:
            data[at] ^= 0x10
        path.write_bytes(data)
        return path


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def test_a_damaged_value_a_short_file_and_a_manifest_are_left_out(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = saved.damage("ckpt-3.json")
    path = saved.damage("mp_rank_0/ckpt-2-*.data-*")
    assert saved.manager.restore(fall_back=True) == str(saved.folder / "ckpt-1")
    assert saved.number == 1
    said = capsys.readouterr().err
    assert (
        f"smp_tf: 'ckpt-1', the newest whole checkpoint in '{saved.folder}', is restored. 'ckpt-3' is left out" in said
    )
    assert f"'ckpt-3' is left out: The checkpoint's manifest {manifest} is damaged or truncated." in said
    assert f"'ckpt-2' is left out: 'rest' of checkpoint ckpt-2 cannot be read from {path}" in said
    # The training goes on, and its saves replace what is damaged.
    saved.number.assign(7)
    saved.manager.save()
    saved.number.assign(0)
    saved.manager.save()
    assert saved.manager.restore("ckpt-2") is not None
    assert saved.number == 7


def test_without_damage_the_latest_is_restored_and_nothing_is_said(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saved.manager.restore(fall_back=True) == str(saved.folder / "ckpt-3")
    assert saved.number == 3
    assert "left out" not in capsys.readouterr().err


def test_the_error_without_it_says_that_it_exists(saved: Saved) -> None:
    path = saved.damage("mp_rank_0/ckpt-3-*.data-*", None)
    words = rf"{path} of checkpoint ckpt-3 has 4011 bytes.*\nmanager.restore\(fall_back=True\) takes the newest check"
    with pytest.raises(CheckpointError, match=words):
        saved.manager.restore()
    saved.damage("ckpt-3.json")
    with pytest.raises(CheckpointError, match=r"or the newest whole one by manager.restore\(fall_back=True\)"):
        saved.manager.restore()
    assert saved.number == 0


def test_where_none_is_whole_all_are_named(saved: Saved) -> None:
    for number in (1, 2, 3):
        saved.damage(f"mp_rank_0/ckpt-{number}-*.index", 9)
    with pytest.raises(CheckpointError, match=r"^No checkpoint in '.*' is whole\.\n'ckpt-3' is left out: The file"):
        saved.manager.restore(fall_back=True)
    assert saved.number == 0


def test_an_empty_folder_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = smp.CheckpointManager(tf.train.Checkpoint(number=tf.Variable(0)), tmp_path / "none")
    assert manager.restore(fall_back=True) is None


def test_it_is_for_the_latest(saved: Saved) -> None:
    with pytest.raises(ValueError, match=r"so no other can be asked for\. Received: restore_prefix='ckpt-1'"):
        saved.manager.restore("ckpt-1", fall_back=True)


def test_objects_that_do_not_fit_are_no_damage(saved: Saved) -> None:
    other = smp.CheckpointManager(tf.train.Checkpoint(number=tf.Variable([1, 2])), saved.folder)
    with pytest.raises(CheckpointError, match="holds other shapes or dtypes"):
        other.restore(fall_back=True)

"""The oldest checkpoints go, and one in so many hours stays for good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smp_tf.checkpoint import files
from smp_tf.checkpoint.files import Manifest
from smp_tf.checkpoint.rotation import Rotation

MINUTE = 60.0


def save(folder: Path, number: int, minute: float, begun: float = 0.0) -> None:
    before = files.listing(str(folder), "ckpt")
    begun = before.manifests[-1].begun if before.manifests else begun
    manifest = Manifest(f"ckpt-{number}", before.last_sequence + 1, 1, 1, (), {}, saved_at=minute * MINUTE, begun=begun)
    files.commit(str(folder), manifest)


def kept(folder: Path) -> tuple[list[str], list[str]]:
    """The checkpoints that are rotated, and those that stay for good."""
    found = files.listing(str(folder), "ckpt").manifests
    return [m.name[5:] for m in found if not m.is_kept], [m.name[5:] for m in found if m.is_kept]


def after(folder: Path, rotation: Rotation, *minutes: float) -> tuple[list[str], list[str]]:
    """What stays of checkpoints saved at such minutes, rotated after each."""
    first = len(list(folder.glob("*.json")))
    for number, minute in enumerate(minutes, start=first + 1):
        save(folder, number, minute)
        rotation.apply(str(folder), "ckpt")
    return kept(folder)


def test_the_oldest_go(tmp_path: Path) -> None:
    assert after(tmp_path, Rotation(2, None, 0.0), 30, 70, 100, 140) == (["3", "4"], [])


def test_one_that_another_job_deletes_while_the_folder_is_listed_is_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after(tmp_path, Rotation(None, None, 0.0), 30, 70)
    names = os.listdir

    def listed(folder: str) -> list[str]:
        found = names(folder)
        (tmp_path / "ckpt-1.json").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "listdir", listed)
    found = files.listing(str(tmp_path), "ckpt")
    assert (found.names, found.damaged) == (("ckpt-2",), ())


def test_all_stay_without_a_number(tmp_path: Path) -> None:
    assert after(tmp_path, Rotation(None, 1.0, 0.0), 30, 70, 100) == (["1", "2", "3"], [])


def test_one_in_so_many_hours_stays_for_good(tmp_path: Path) -> None:
    rotation = Rotation(2, 1.0, 0.0)
    assert after(tmp_path, rotation, 30, 70, 100, 140, 170, 180) == (["5", "6"], ["2", "4"])


def test_the_hours_are_counted_from_when_the_first_manager_was_made(tmp_path: Path) -> None:
    save(tmp_path, 1, 1000 * MINUTE + 30, begun=1000 * MINUTE * MINUTE)
    for number, minute in ((2, 1000 * MINUTE + 70), (3, 1000 * MINUTE + 80)):
        save(tmp_path, number, minute)
    # Another manager, much later, of a job that was started again.
    Rotation(1, 1.0, 9e9).apply(str(tmp_path), "ckpt")
    assert kept(tmp_path) == (["3"], ["2"])


def test_what_stays_for_good_stays_whatever_a_later_manager_wants(tmp_path: Path) -> None:
    after(tmp_path, Rotation(1, 1.0, 0.0), 70, 80, 90)
    assert after(tmp_path, Rotation(1, None, 0.0), 500) == (["3"], ["1"])


@pytest.mark.parametrize("moment", ["saved_at", "begun", "is_kept"])
def test_they_are_written_down(moment: str, tmp_path: Path) -> None:
    manifest = Manifest("ckpt-1", 0, 1, 1, (), {}, saved_at=1.5, begun=0.5, is_kept=True)
    files.commit(str(tmp_path), manifest)
    assert getattr(files.read_manifest(str(tmp_path), "ckpt-1"), moment) == getattr(manifest, moment)

"""Whenever a job of two ranks is killed while it saves, a whole checkpoint is left: every state of the disk is tried.

What each rank does to the disk in a save is written down, and where it waits for all others:

    rank 0   part written │ manifest written, renamed; earlier one deleted, its parts │
    rank 1   part written │                                                           │
                     all have written                                       all have committed

Wherever the ranks are killed, together or one alone, the disk holds what each had done: a beginning of rank 0's changes
and one of rank 1's, both in the same space between two waits. Every such pair is made up and read. A file that is being
written is half there, or empty. `test_checkpoint_kill.py` kills real processes; here all moments of both are tried.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.checkpoint import files, leftovers
from smp_tf.checkpoint import tensors as checkpoint_tensors
from smp_tf.checkpoint import writing as checkpoint_writing
from smp_tf.checkpoint.rotation import Rotation
from smp_tf.checkpoint.survey import Item, StateKind, Survey
from smp_tf.job import runtime
from smp_tf.partition.layout import Layout
from smp_tf.variables import step_seeds
from tests.smp_tf.rank_threads import Ranks

RANKS = 2
#: One change of the disk: applied to a folder that stands for the directory of the checkpoints.
Change = Callable[[Path], Any]


class Journal:
    """What every rank changes, in spaces between waits.

    Args:
        directory: of the checkpoints; what is changed elsewhere is not written down.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._here = threading.local()
        self.spaces: list[list[list[Change]]] = [[[]] for _ in range(RANKS)]

    def begin(self, rank: int) -> None:
        """From now on this thread is a rank."""
        self._here.rank = rank

    def wait(self) -> None:
        """This rank waits for all others."""
        if hasattr(self._here, "rank"):
            self.spaces[self._here.rank].append([])

    def note(self, *changes: Change) -> None:
        """This rank has changed the disk."""
        if hasattr(self._here, "rank"):
            self.spaces[self._here.rank][-1].extend(changes)

    def note_file(self, name: str, beside: str = "") -> None:
        """This rank has written a file, perhaps under another name first."""
        data, first = (self._directory / name).read_bytes(), name + beside
        self.note(*(_write(first, data[:end]) for end in (0, len(data) // 2, len(data))))
        if beside:
            self.note(_rename(first, name))

    def relative(self, path: Any) -> str:
        """A path below the directory."""
        return os.path.relpath(path, self._directory)


def _write(name: str, data: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data)


def _rename(source: str, target: str) -> Change:
    return lambda folder: os.replace(folder / source, folder / target)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    """Notes what is done to tmp_path / "saved"."""
    made = Journal(tmp_path / "saved")
    makedirs, replace, remove, fdopen, save = os.makedirs, os.replace, os.remove, os.fdopen, tf.raw_ops.SaveV2
    allgather = checkpoint_writing.exchange.allgather_json

    def noted_makedirs(path: Any, *args: Any, **kwargs: Any) -> None:
        makedirs(path, *args, **kwargs)
        made.note(lambda folder: (folder / made.relative(path)).mkdir(parents=True, exist_ok=True))

    def noted_replace(source: Any, target: Any) -> None:
        replace(source, target)
        made.note(_rename(made.relative(source), made.relative(target)))

    def noted_remove(path: Any) -> None:
        remove(path)
        made.note(lambda folder: (folder / made.relative(path)).unlink())

    def noted_fdopen(descriptor: int, mode: str) -> Any:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        file = fdopen(descriptor, mode)
        close = file.close

        def noted_close() -> None:
            close()
            made.note_file(made.relative(path))

        return _Closing(file, noted_close)

    def noted_save(prefix: str, **kwargs: Any) -> None:
        save(prefix=prefix, **kwargs)
        # In this order TensorFlow makes them, each under another name first.
        for end in (".data-00000-of-00001", ".index"):
            made.note_file(made.relative(prefix + end), beside=".tempstate123")

    def waiting(value: Any, name: str) -> Any:
        made.wait()
        return allgather(value, name=name)

    monkeypatch.setattr(os, "makedirs", noted_makedirs)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "remove", noted_remove)
    monkeypatch.setattr(os, "fdopen", noted_fdopen)
    monkeypatch.setattr(tf.raw_ops, "SaveV2", noted_save)
    monkeypatch.setattr(checkpoint_writing.exchange, "allgather_json", waiting)
    yield made
    monkeypatch.undo()


class _Closing:
    """A file that tells when it is closed."""

    def __init__(self, file: Any, close: Callable[[], None]) -> None:
        self._file, self._close = file, close

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *_: object) -> None:
        self._close()


def survey_of(rank: int, value: int) -> Survey:
    """What a rank has: variables of its stage, and one that all ranks have; all say which save it is."""
    own = {
        key: Item(key, StateKind.MODEL, tf.Variable(tf.fill([50], value)), Layout(stage, stage), stage == rank)
        for stage in range(RANKS)
        for key in [f"model/{stage}"]
    }
    return Survey({**own, "number": Item("number", StateKind.SCRIPT, tf.Variable(value))}, has_models=True)


def save(directory: Path, name: str, rank: int, value: int) -> None:
    """What `CheckpointManager.save` does once it has looked at the objects."""
    writing = checkpoint_writing.Writing(str(directory), "ckpt", name, survey_of(rank, value))
    writing.write_parts()
    writing.commit(Rotation(1, None, 0.0))


def check(directory: Path) -> int:
    """The save that is left, as whole as it was made."""
    found = files.listing(str(directory), "ckpt")
    assert found.damaged == ()
    assert found.names, "no checkpoint is left"
    for name in found.names:
        manifest = files.read_manifest(str(directory), name)
        files.check_files(str(directory), manifest)
        tensors = checkpoint_tensors.read_tensors(str(directory), manifest, manifest.tensors)
        read = {key: set(value.numpy().ravel()) for key, value in tensors}
        assert read == {key: {manifest.sequence} for key in ("model/0", "model/1", "number")}
    # What was interrupted goes with the next save, and nothing else.
    leftovers.clean(str(directory), "ckpt", math.inf)
    left = {path.relative_to(directory).as_posix().partition(".")[0] for path in directory.glob("mp_rank_*/*")}
    assert left == found.parts
    assert not list(directory.glob(".writing-*"))
    return int(manifest.sequence)


@pytest.mark.parametrize("again", ["ckpt-2", "ckpt-1"], ids=["another number", "the same number"])
def test_every_state_of_the_disk(again: str, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "saved"
    ranks = Ranks(monkeypatch, RANKS, RANKS)
    monkeypatch.setattr(runtime, "current", ranks.current)
    monkeypatch.setattr(step_seeds, "state", dict)

    assert ranks.run(lambda rank: save(directory, "ckpt-1", rank, 0)) == [None] * RANKS
    assert check(directory) == 0
    base = tmp_path / "base"
    shutil.copytree(directory, base)

    def recorded(rank: int) -> None:
        journal.begin(rank)
        save(directory, again, rank, 1)

    assert ranks.run(recorded) == [None] * RANKS
    counts = [[len(space) for space in spaces] for spaces in journal.spaces]
    # Before all have come, while parts are written, while rank 0 commits, and after it.
    committing = {"ckpt-2": 10, "ckpt-1": 9}[again]
    assert counts == [[0, 9, committing, 0], [0, 9, 0, 0]]

    seen = []
    for space in range(len(counts[0])):
        first, second = (spaces[space] for spaces in journal.spaces)
        for here, there in itertools.product(range(len(first) + 1), range(len(second) + 1)):
            state = tmp_path / "state"
            shutil.copytree(base, state)
            for change in (*first[:here], *second[:there]):
                change(state)
            seen.append(check(state))
            shutil.rmtree(state)
        for change in (*first, *second):
            change(base)
    assert seen == sorted(seen), "a later moment has an earlier checkpoint"
    assert (seen[0], seen[-1]) == (0, 1)
    assert len(seen) > 100

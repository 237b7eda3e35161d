"""A checkpoint that is written while the training goes on is that of the moment of the save; its failure is never lost.

Several ranks, and ranks that are killed meanwhile, are in tests/distributed/test_checkpoints.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf import announce
from smp_tf.checkpoint import files, tensors
from smp_tf.errors import CheckpointError
from tests.smp_tf.checkpoint.test_manager import Training, manager_of, new_process


@pytest.fixture(autouse=True)
def _init(init: Callable[..., None]) -> None:
    init(microbatches=2)


class Gate:
    """What holds up the writing thread until the test opens it, or lets it fail."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def pass_by(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found, write = Gate(), tensors.write_part

    def held_up(*args: Any) -> Any:
        found.pass_by()
        return write(*args)

    monkeypatch.setattr(tensors, "write_part", held_up)
    yield found
    found.opened.set()


class Numbers:
    """Some variables, and the manager that saves them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.number = tf.Variable(1)
        self.rest = [tf.Variable(tf.ones([100, 7], dtype)) for dtype in (tf.float16, tf.bfloat16, tf.int64)]
        self.rest += [tf.Variable(["a", "b"]), tf.Variable([True, False]), tf.Variable([1 + 2j])]
        checkpoint = tf.train.Checkpoint(number=self.number, rest=self.rest)
        self.manager = smp.CheckpointManager(checkpoint, folder, **{"asynchronous": True, **options})


def test_the_training_goes_on_and_the_checkpoint_is_that_of_the_save(gate: Gate, tmp_path: Path) -> None:
    training = Training()
    training.losses(0, 1)
    manager = manager_of(training, tmp_path, asynchronous=True)
    assert manager.save() == str(tmp_path / "ckpt-1")
    assert gate.reached.wait(60)
    # Masks go on as well: what they depend on is that of the save, too.
    expected = training.losses(2, 3)
    assert manager.latest_checkpoint is None
    gate.opened.set()
    manager.wait()
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-1")
    new_process()
    resumed = Training()
    manager_of(resumed, tmp_path).restore()
    assert resumed.losses(2, 3) == expected


def test_the_files_are_those_of_any_save(gate: Gate, tmp_path: Path) -> None:
    numbers = Numbers(tmp_path)
    numbers.manager.save(1)
    assert gate.reached.wait(60)
    for variable in (numbers.number, *numbers.rest[:3]):
        variable.assign_add(tf.ones_like(variable))
    numbers.rest[3].scatter_nd_update([[0]], ["c"])
    gate.opened.set()
    numbers.manager.wait()
    other = Numbers(tmp_path, asynchronous=False)
    other.manager.save(2)
    first, second = (next(tmp_path.glob(f"mp_rank_0/ckpt-{number}-*.data-*")) for number in (1, 2))
    assert first.read_bytes() == second.read_bytes()
    one, two = (files.read_manifest(str(tmp_path), f"ckpt-{number}") for number in (1, 2))
    assert one.tensors == two.tensors
    assert one.parts[0].index_hash == two.parts[0].index_hash


def test_one_save_goes_on_at_a_time_and_the_next_says_once_that_it_waits(
    gate: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announce, "_said", set())
    numbers = Numbers(tmp_path, max_to_keep=2)
    numbers.manager.save()
    assert gate.reached.wait(60)
    # The second save begins while the first goes on, which ends once this is said.
    opener = threading.Thread(target=_open_when, args=(gate, lambda: "waits until" in capsys.readouterr().err))
    opener.start()
    numbers.manager.save()
    opener.join()
    numbers.manager.save()
    numbers.manager.wait()
    assert [Path(path).name for path in numbers.manager.checkpoints] == ["ckpt-2", "ckpt-3"]


def _open_when(gate: Gate, is_time: Callable[[], bool]) -> None:
    waiting = threading.Event()
    while not is_time():
        waiting.wait(0.01)
    gate.opened.set()


@pytest.mark.parametrize("at", ["save", "restore", "wait", "shutdown"])
def test_a_failure_is_told_at_once_and_raised_by_the_next_call(
    at: str, gate: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.opened.set()
    numbers = Numbers(tmp_path)
    numbers.manager.save()
    numbers.manager.wait()
    gate.error = OSError(28, "No space left on device")
    numbers.manager.save()
    call = smp.shutdown if at == "shutdown" else getattr(numbers.manager, at)
    with pytest.raises(CheckpointError, match=r"(?s)Checkpoint 'ckpt-2' could not be written:\n.*in the background"):
        call()
    said = capsys.readouterr().err
    assert "smp_tf: saving checkpoint 'ckpt-2' in the background has failed. Checkpoint 'ckpt-2' could not" in said
    assert [Path(path).name for path in numbers.manager.checkpoints] == ["ckpt-1"]
    assert len(list(tmp_path.glob("mp_rank_0/*"))) == 2
    # It is raised once, and the next save is whole.
    gate.error = None
    numbers.manager.wait()
    numbers.manager.save()
    numbers.manager.wait()
    assert [Path(path).name for path in numbers.manager.checkpoints] == ["ckpt-1", "ckpt-3"]


def test_values_that_cannot_be_copied_are_a_failure_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers(tmp_path)
    monkeypatch.setattr(tf.raw_ops, "DeepCopy", lambda x: _raise(MemoryError("no room for a copy")))
    numbers.manager.save()
    with pytest.raises(CheckpointError, match="MemoryError: no room for a copy"):
        numbers.manager.wait()
    assert numbers.manager.latest_checkpoint is None


def test_without_more_threads_the_main_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: _raise(RuntimeError("can't start new thread")))
    numbers.manager.save()
    assert numbers.manager.latest_checkpoint == str(tmp_path / "ckpt-1")
    numbers.manager.wait()


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.full
def test_the_callback_ends_when_its_last_checkpoint_is_whole(tmp_path: Path) -> None:
    model = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Input((3,)), layers.Dense(2)]))
    model.compile("sgd", "mse")
    saves = smp.callbacks.Checkpoint(tmp_path, max_to_keep=2, asynchronous=True)
    model.fit(np.ones([8, 3]), np.ones([8, 2]), epochs=3, verbose=0, callbacks=[saves])
    found = files.listing(str(tmp_path), "ckpt")
    assert found.names == ("ckpt-2", "ckpt-3")
    for manifest in found.manifests:
        files.check_files(str(tmp_path), manifest)


ENDING = """
import sys, threading
import smp_tf as smp
import tensorflow as tf
from smp_tf.checkpoint import tensors

folder, fails = sys.argv[1], sys.argv[2] == "fails"
write = tensors.write_part

def late(*args):
    threading.main_thread().join()  # the script is over
    if fails:
        raise OSError(28, "No space left on device")
    return write(*args)

smp.init({"partitions": 1})
tensors.write_part = late
smp.CheckpointManager(tf.train.Checkpoint(value=tf.Variable(3)), folder, asynchronous=True).save()
"""


@pytest.mark.full
@pytest.mark.parametrize("way", ["writes", "fails"])
def test_a_script_that_ends_without_shutdown_waits(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDING)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "c"), way],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    found = files.listing(str(tmp_path / "c"), "ckpt")
    if way == "writes":
        [manifest] = found.manifests
        files.check_files(str(tmp_path / "c"), manifest)
    else:
        assert found.names == ()
        assert (
            "smp_tf: saving checkpoint 'ckpt-1' in the background has failed. Checkpoint 'ckpt-1' coul" in ended.stderr
        )


def status(name: str) -> int:
    """A size that the kernel tells of this process, in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


@pytest.mark.full
def test_it_takes_one_copy_of_the_values(tmp_path: Path) -> None:
    values = [tf.Variable(tf.ones([4_000_000])) for _ in range(8)]
    own = sum(variable.numpy().nbytes for variable in values)
    found = {}
    for asynchronous in (False, True):
        checkpoint = tf.train.Checkpoint(values=values)
        manager = smp.CheckpointManager(checkpoint, tmp_path / str(asynchronous), asynchronous=asynchronous)
        Path("/proc/self/clear_refs").write_text("5")  # the largest memory so far becomes that of now
        resident = status("VmRSS")
        manager.save()
        manager.wait()
        found[asynchronous] = status("VmHWM") - resident
    assert found[False] < 0.25 * own, found
    assert 0.9 * own < found[True] < 1.25 * own, found

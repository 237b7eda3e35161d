"""A process killed at any moment of a save leaves a checkpoint that is whole: every such moment is tried.

Each try is a process of its own, forked from a server that has imported TensorFlow and run nothing, so that it takes
half a second and not five. It saves twice, keeping one checkpoint, and ends itself with SIGKILL at its n-th call that
changes what is on disk, for n = 1, 2, ... until it gets to the end.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_tf.checkpoint import files, leftovers
from smp_tf.checkpoint import tensors as checkpoint_tensors

pytestmark = pytest.mark.large

# What a save calls to change what is on disk.
CALLS = ("makedirs", "fsync", "replace", "remove")


def save_and_die(folder: str, deadly: int, number: int | None, asynchronous: bool) -> None:
    """Save 1, then 2 (or a number again), and die at a call of the second save."""
    import smp_tf as smp  # isort: split
    import tensorflow as tf

    smp.init({"partitions": 1, "seed": 1})
    value = tf.Variable(1)
    checkpoint = tf.train.Checkpoint(value=value, more=[tf.Variable(tf.ones([100])) for _ in range(3)])
    manager = smp.CheckpointManager(checkpoint, folder, max_to_keep=1, asynchronous=asynchronous)
    manager.save()
    manager.wait()
    value.assign(2)
    calls = 0

    def counted(original: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            result = original(*args, **kwargs) if after else None
            calls += 1
            if calls == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return result if after else original(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    # Before a part's files exist, and when they do.
    tf.raw_ops.SaveV2 = counted(counted(tf.raw_ops.SaveV2, after=True))
    manager.save(number)
    value.assign(3)
    manager.wait()


def start(folder: Path, deadly: int, number: int | None, asynchronous: bool) -> int:
    """The exit code of one try; minus 9 where it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["smp_tf", "tensorflow", "tf_keras", "horovod.tensorflow", "smp_tf.checkpoint.manager"]
    )
    process = context.Process(target=save_and_die, args=(str(folder), deadly, number, asynchronous))
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


@pytest.mark.parametrize(
    ("number", "asynchronous"),
    [(None, False), *(pytest.param(*full, marks=pytest.mark.full) for full in ((1, False), (None, True), (1, True)))],
    ids=["another number", "the same number", "in the background", "the same number, in the background"],
)
def test_every_moment(number: int | None, asynchronous: bool, tmp_path: Path) -> None:
    seen = []
    for deadly in range(1, 60):
        folder = tmp_path / str(deadly)
        code = start(folder, deadly, number, asynchronous)
        found = files.listing(str(folder), "ckpt")
        assert found.damaged == ()
        assert found.names, f"killed at call {deadly}, no checkpoint is left"
        for name in found.names:
            manifest = files.read_manifest(str(folder), name)
            files.check_files(str(folder), manifest)
            read = {
                key: v.numpy() for key, v in checkpoint_tensors.read_tensors(str(folder), manifest, manifest.tensors)
            }
            assert read["more/2"].tolist() == [1.0] * 100
            assert manifest.sequence == read["value"] - 1
        seen.append((len(found.names), manifest.sequence))
        # What was interrupted is gone after the next save, and nothing else.
        leftovers.clean(str(folder), "ckpt", math.inf)
        parts = {path.name.split(".")[0] for path in folder.glob("mp_rank_*/*")}
        assert parts == {prefix.rpartition("/")[2] for prefix in found.parts}
        assert not list(folder.glob(".writing-*"))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    # First the earlier one is left, then perhaps both, then the later one.
    assert seen[0] == (1, 0)
    assert seen[-1] == (1, 1)
    assert len(seen) > 10
    order = sorted(seen, key=lambda state: state[1])
    assert seen == order

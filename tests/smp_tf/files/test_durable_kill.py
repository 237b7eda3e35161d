"""A process killed at any moment of putting something in its place leaves the earlier one or the new one, whole.

Each try is a child, forked when all is prepared, which ends itself with SIGKILL before its n-th call that changes what
is on disk, for n = 1, 2, ... until it gets to the end. The child calls nothing of TensorFlow.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import tensorflow as tf

import smp_tf
from smdistributed.modelparallel.tensorflow.utils import receive_checkpoint_files, send_checkpoint_files
from smp_tf.checkpoint import files as checkpoint_files
from smp_tf.checkpoint import tensors as checkpoint_tensors
from smp_tf.checkpoint.manifest import Manifest, StoredTensor
from smp_tf.files import durable_files
from smp_tf.model import tf_checkpoint

# What changes the disk; `_exchange` is in place of a system call that Python has no name for.
CALLS = ("mkdir", "fsync", "rename", "replace", "remove", "unlink", "rmdir", "link")
OLD, NEW = [1.0, 1.0], [2.0, 2.0, 2.0]


def killed_at(deadly: int, change: Callable[[], None]) -> bool:
    """Whether a child that makes a change is killed before its n-th call; else it got to the end before."""
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        durable_files._exchange = counted(durable_files._exchange)
        try:
            change()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), "the child failed"
    return status != 0


def at_every_moment(
    tmp_path: Path,
    prepare: Callable[[Path], None],
    change: Callable[[Path], None],
    look: Callable[[Path], list[float]],
) -> None:
    """Kill a child at every moment of a change; what is found after it is the old, and from some moment on the new."""
    prepare(tmp_path / "prepared")
    seen: list[list[float]] = []
    is_killed, deadly = True, 0
    while is_killed:
        deadly += 1
        assert deadly < 200
        folder = tmp_path / "tried"
        shutil.copytree(tmp_path / "prepared", folder)
        is_killed = killed_at(deadly, lambda: change(tmp_path / "tried"))
        seen.append(look(folder))
        shutil.rmtree(folder)
    assert seen == [OLD] * seen.count(OLD) + [NEW] * seen.count(NEW)
    assert min(seen.count(OLD), seen.count(NEW)) >= 2


def text(values: list[float]) -> str:
    return " ".join(map(str, values))


def values_in(path: Path) -> list[float]:
    return [float(value) for value in path.read_text().split()]


def test_a_file(tmp_path: Path) -> None:
    def write(folder: Path, values: list[float]) -> None:
        durable_files.write_file(folder / "file", text(values))

    at_every_moment(
        tmp_path,
        lambda folder: write(folder, OLD),
        lambda folder: write(folder, NEW),
        lambda folder: values_in(folder / "file"),
    )


@pytest.mark.parametrize("way", ["exchanged", pytest.param("renamed", marks=pytest.mark.full)])
def test_a_folder(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "renamed":
        monkeypatch.setattr(durable_files, "_exchange", lambda first, second: False)

    def write(folder: Path, values: list[float]) -> None:
        with durable_files.building(folder / "model") as built:
            os.makedirs(os.path.join(built, "variables"))
            for name in ("saved_model.pb", "variables/variables.index"):
                Path(built, name).write_text(text(values))
            durable_files.put_in_place(built, folder / "model")

    def look(folder: Path) -> list[float]:
        places = [folder / "model"]
        if way == "renamed" and not places[0].exists():
            # Between two renames it is there under another name.
            places = list(folder.glob(".replaced-*-model"))
        [place] = places
        first, second = (values_in(place / name) for name in ("saved_model.pb", "variables/variables.index"))
        assert first == second
        return first

    at_every_moment(tmp_path, lambda folder: write(folder, OLD), lambda folder: write(folder, NEW), look)


def test_weights_in_tensorflows_files(tmp_path: Path) -> None:
    def write(prefix: Path, values: list[float], files: int) -> None:
        """Values in so many files, as `tf_checkpoint.replace_values` makes them."""
        prefix.parent.mkdir(parents=True)
        parts = [f"{prefix}-part-{number}" for number in range(files)]
        for number, part in enumerate(parts):
            tf.raw_ops.SaveV2(
                prefix=part, tensor_names=[str(number)], shape_and_slices=[""], tensors=[tf.constant(values)]
            )
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(prefix))

    def prepare(folder: Path) -> None:
        write(folder / "old" / "w", OLD, 1)
        tf_checkpoint.put_in_place(str(folder / "old" / "w"), str(folder / "w"))
        write(folder / "new" / "w", NEW, 2)

    def change(folder: Path) -> None:
        tf_checkpoint.put_in_place(str(folder / "new" / "w"), str(folder / "w"))

    def look(folder: Path) -> list[float]:
        reader = tf.train.load_checkpoint(str(folder / "w"))
        found = [reader.get_tensor(key).tolist() for key in reader.get_variable_to_shape_map()]
        assert found in ([OLD], [NEW, NEW])
        return found[0]

    at_every_moment(tmp_path, prepare, change, look)


def test_checkpoints_that_are_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(folder: Path, number: int, values: list[float]) -> None:
        prefix = f"mp_rank_0/ckpt-{number}-{len(values):08x}"
        part = checkpoint_tensors.write_part(str(folder), prefix, {"v": tf.constant(values)})
        tensors = {"v": StoredTensor(0, "float32", (len(values),), "script")}
        checkpoint_files.commit(str(folder), Manifest(f"ckpt-{number}", number, 1, 1, (part,), tensors))

    def prepare(folder: Path) -> None:
        save(folder / "source", 1, NEW)
        save(folder / "source", 2, NEW)
        save(folder / "target", 1, OLD)

    def change(folder: Path) -> None:
        queue: SimpleQueue[Any] = SimpleQueue()
        monkeypatch.setattr(smp_tf, "send", lambda obj, dest_rank: queue.put(obj))
        monkeypatch.setattr(smp_tf, "recv_from", lambda src_rank: queue.get_nowait())
        send_checkpoint_files(folder / "source", 1)
        receive_checkpoint_files(folder / "target", 0)

    def look(folder: Path) -> list[float]:
        found = checkpoint_files.listing(str(folder / "target"), "ckpt")
        assert found.damaged == ()
        *_, latest = found.manifests
        checkpoint_files.check_files(str(folder / "target"), latest)
        [(_, value)] = checkpoint_tensors.read_tensors(str(folder / "target"), latest, ["v"])
        return [float(number) for number in value.numpy()]

    at_every_moment(tmp_path, prepare, change, look)

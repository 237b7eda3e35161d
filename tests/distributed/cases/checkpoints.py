"""Trainings that are saved, and trainings that go on from there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.checkpoint import files as checkpoint_files
from smp_tf.checkpoint import restore
from smp_tf.checkpoint import tensors as checkpoint_tensors
from smp_tf.checkpoint.survey import StateKind, survey
from tests.distributed.scripts import exported_model

SAVED_AT = 3
STEPS = 6
# Samples of all replicas together: one shape, or two of which a resumed training sees the other one first.
SAMPLES = {"one": (32,) * 6, "two": (32, 32, 16, 16, 32, 16)}


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.hidden = [layers.Dense(width, activation="tanh") for width in (9, 8, 7)]
        self.normal = layers.BatchNormalization()
        self.drop = layers.Dropout(0.4)
        self.head = layers.Dense(2)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        for layer in self.hidden:
            x = self.drop(layer(x), training=training)
        return self.head(self.normal(x, training=training))


def optimizer_named(name: str) -> Any:
    if name == "adam":
        return tf_keras.optimizers.Adam(tf_keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5, True))
    return {
        "adafactor": lambda: tf_keras.optimizers.Adafactor(0.01),
        "averages": lambda: tf_keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True),
        "legacy": lambda: tf_keras.optimizers.legacy.RMSprop(0.01, momentum=0.9),
        "nadam": lambda: tf_keras.optimizers.Nadam(0.01),
    }[name]()


class Training:
    """A model, an optimizer, a metric and a counter of the script's, and what trains them."""

    def __init__(self, optimizer: str = "adam", eager: bool = True, shapes: str = "two") -> None:
        tf_keras.backend.set_floatx("float64")
        tf_keras.mixed_precision.set_global_policy("float64")
        self.net, self.optimizer = Net(), optimizer_named(optimizer)
        self.seen = tf.Variable(0, dtype=tf.int64)
        self.mean = tf_keras.metrics.Mean()
        self.checkpoint = tf.train.Checkpoint(
            model=self.net, optimizer=self.optimizer, seen=self.seen, metrics=[self.mean]
        )

        @smp.step
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.net(x, training=True) - 1.0) ** 2)
            return tape.gradient(loss, self.net.trainable_variables), loss

        @smp.step
        def predict(x: tf.Tensor) -> Any:
            return self.net(x, training=False)

        def train(x: tf.Tensor) -> tf.Tensor:
            gradients, loss = step(x)
            sums = [gradient.accumulate() for gradient in gradients]
            self.optimizer.apply_gradients(zip(sums, self.net.trainable_variables, strict=True))
            self.mean.update_state(loss.reduce_mean())
            return loss.reduce_mean()

        self._shapes = shapes
        self._train = train if eager else tf.function(train)
        self.predict = predict

    def run(self, numbers: Iterable[int]) -> list[float]:
        """Steps of the given numbers; returns their losses."""
        losses = []
        for number in numbers:
            x = batch(number, self._shapes)
            losses.append(float(self._train(x)))
            self.seen.assign_add(len(x))
        return losses

    def state(self) -> dict[str, np.ndarray]:
        """What this rank stores, by key."""
        items = survey(self.checkpoint).items.values()
        return {i.key: i.target.numpy() for i in items if i.is_here and i.kind is not StateKind.STATE}


def batch(number: int, shapes: str = "two") -> np.ndarray:
    whole = np.random.RandomState(number).standard_normal((SAMPLES[shapes][number], 5))
    return whole[smp.dp_rank() :: smp.dp_size()]


def whole(folder: str, eager: bool, shapes: str, optimizer: str) -> dict[str, Any]:
    """A training that saves on its way and is not interrupted."""
    training = Training(optimizer, eager, shapes)
    manager = smp.CheckpointManager(training.checkpoint, folder)
    training.run(range(SAVED_AT))
    path = manager.save()
    losses = training.run(range(SAVED_AT, STEPS))
    return {"path": path, "losses": losses, "state": training.state(), "replica": smp.dp_rank()}


def resumed(folder: str, eager: bool, shapes: str, when: str = "before", optimizer: str = "adam") -> dict[str, Any]:
    """The rest of it.

    Args:
        folder: of the checkpoint.
        eager: apply gradients outside a tf.function.
        shapes: of batches, "one" or "two", as in the training that was saved.
        when: "before" the first step, "after" some, or "after evaluation": after a first step that does not train.
        optimizer: as in the training that was saved.
    """
    read: list[str] = []

    def noted(directory: str, manifest: Any, keys: Iterable[str]) -> Iterator[tuple[str, tf.Tensor]]:
        wanted = list(keys)
        read.extend(wanted)
        return checkpoint_tensors.read_tensors(directory, manifest, wanted)

    restore.read_tensors = noted
    try:
        training = Training(optimizer, eager, shapes)
        manager = smp.CheckpointManager(training.checkpoint, folder)
        if when == "after":
            training.run([5, 4])
        path = manager.restore("ckpt-1") if when == "after" else manager.restore()
        if when == "after evaluation":
            training.predict(batch(2, shapes))
        losses = training.run(range(SAVED_AT, STEPS))
    finally:
        restore.read_tensors = checkpoint_tensors.read_tensors
    manifest = checkpoint_files.read_manifest(folder, "ckpt-1")
    of_stages = {key for key, stored in manifest.tensors.items() if stored.stage is not None}
    return {
        "path": path,
        "losses": losses,
        "state": training.state(),
        "replica": smp.dp_rank(),
        "read of stages": sorted(set(read) & of_stages),
        "held of stages": sorted(set(training.state()) & of_stages),
    }


class Large(smp.DistributedModel):
    """Four layers of 16 MB each, of which the first is alone on its partition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_of = [layers.Dense(2000, use_bias=False) for _ in range(4)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for number, layer in enumerate(self.layers_of):
            with smp.partition(min(number, 1)):
                x = layer(x)
        return x


def measured(folder: str) -> dict[str, Any]:
    """Bytes that this rank reads from files, and by how much its memory grows at most, while it restores.

    Before the first step, which takes the values up, and into a training that is under way.
    """
    x = np.ones((4, 2000), np.float32)

    def training() -> tuple[smp.CheckpointManager, Any, Any]:
        net, optimizer = Large(), tf_keras.optimizers.SGD(0.01, momentum=0.9)

        @smp.step
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(net(x) ** 2)
            return tape.gradient(loss, net.trainable_variables)

        def train() -> None:
            sums = [gradient.accumulate() for gradient in step(x)]
            optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))

        return smp.CheckpointManager(tf.train.Checkpoint(model=net, optimizer=optimizer), folder), train, net

    manager, train, net = training()
    train()
    manager.save()
    own = 2 * sum(v.numpy().nbytes for v in net.local_variables)
    again, train_again, _ = training()
    before = bytes_read()
    again.restore()
    train_again()
    first = bytes_read() - before
    Path("/proc/self/clear_refs").write_text("5")  # the largest memory so far becomes that of now
    before, resident = bytes_read(), status("VmRSS")
    again.restore()
    return {
        "own": own,
        "read at the first step": first,
        "read under way": bytes_read() - before,
        "memory": status("VmHWM") - resident,
    }


def bytes_read() -> int:
    """What this process has read from files and pipes."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"])


def status(name: str) -> int:
    """A size that the kernel tells of this process, in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def rotation(folder: str) -> dict[str, Any]:
    """Five saves, of which two stay; the fourth number is used again."""
    training = Training()
    manager = smp.CheckpointManager(training.checkpoint, folder, max_to_keep=2)
    training.run([0])
    kept = []
    for number in (None, None, None, None, 4):
        manager.save(number)
        smp.barrier()
        kept.append([os.path.basename(path) for path in manager.checkpoints])
        smp.barrier()
    return {"kept": kept, "latest": os.path.basename(manager.latest_checkpoint)}


def restored_from_nothing(folder: str) -> dict[str, Any]:
    training = Training()
    manager = smp.CheckpointManager(training.checkpoint, folder)
    return {"paths": [manager.restore(), manager.restore("ckpt-7"), manager.restore(restore_prefix="ckpt-7")]}


def left_over(folder: str) -> dict[str, Any]:
    """Whole trainings' checkpoints restored into less; the errors of all ranks."""
    training = Training()
    checkpoint = tf.train.Checkpoint(model=training.net, seen=training.seen)
    manager = smp.CheckpointManager(checkpoint, folder)
    manager.restore("ckpt-1")
    training.run([0])
    told = []
    for again in (lambda: training.run([1]), manager.save):
        try:
            again()
        except Exception as error:
            told.append([type(error).__name__, str(error)])
    manager.restore("ckpt-1", expect_partial=True)
    return {"told": told}


def damaged(folder: str, after: bool) -> dict[str, Any]:
    """A checkpoint with a flipped byte in a part; what is told, and whether anything changed."""
    training = Training()
    manager = smp.CheckpointManager(training.checkpoint, folder)
    if after:
        training.run([0])
    before = training.state()
    told = ""
    try:
        manager.restore()
        training.run([1])
    except smp.errors.CheckpointError as error:
        told = str(error)
    now = training.state()
    return {"told": told, "changed": [key for key in before if not np.array_equal(before[key], now[key])]}


def fallen_back(folder: str) -> dict[str, Any]:
    """A value of the latest checkpoint is damaged, which only rank 1 reads; the one before is restored."""
    training = Training()
    manager = smp.CheckpointManager(training.checkpoint, folder)
    training.run([0])
    manager.save()
    expected = list(training.net.get_weights())
    training.run([1])
    manager.save()
    smp.barrier()
    if smp.rank() == 0:
        [path] = Path(folder, "mp_rank_1").glob("ckpt-2-*.data-*")
        data = bytearray(path.read_bytes())
        data[11] ^= 0x10
        path.write_bytes(data)
    smp.barrier()
    again = Training()
    manager = smp.CheckpointManager(again.checkpoint, folder)
    told = ""
    try:
        manager.restore()
        again.run([1])
    except smp.errors.CheckpointError as error:
        told = str(error)
    last = Training()
    manager = smp.CheckpointManager(last.checkpoint, folder)
    path = manager.restore(fall_back=True)
    last.predict(batch(1))
    return {"told": told, "path": path, "expected": expected, "weights": list(last.net.get_weights())}


def saved_in_background(folder: str) -> dict[str, Any]:
    """Steps run while rank 1 is held up in writing; then its disk is full."""
    gate, write = threading.Event(), checkpoint_tensors.write_part

    def held_up(*args: Any) -> Any:
        assert gate.wait(60)
        return write(*args)

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    def writes(write_part: Any) -> None:
        checkpoint_tensors.write_part = write_part if smp.rank() == 1 else write

    training = Training()
    training.run([0])
    smp.CheckpointManager(training.checkpoint, folder, checkpoint_name="sync").save(1)
    manager = smp.CheckpointManager(training.checkpoint, folder, asynchronous=True)
    found: dict[str, Any] = {}
    try:
        writes(held_up)
        manager.save(1)
        training.run([1, 2])
        found["while it is written"] = manager.checkpoints
        # The ranks talk to each other meanwhile.
        smp.barrier()
        gate.set()
        manager.wait()
        found["then"] = [os.path.basename(path) for path in manager.checkpoints]
        writes(full)
        manager.save(2)
        training.run([3])
        writes(write)
        try:
            manager.save(3)
        except smp.errors.CheckpointError as error:
            found["told"] = str(error)
        manager.save(4)
        manager.wait()
    finally:
        checkpoint_tensors.write_part = write
    smp.barrier()
    found["at the end"] = [os.path.basename(path) for path in manager.checkpoints]
    return found


def saved_for_export(folder: str) -> dict[str, Any]:
    """A training of the model of a script, which saves a checkpoint and writes the model itself."""
    tf_keras.backend.set_floatx("float32")
    model = smp.DistributedModel(exported_model.compiled)
    x = np.random.default_rng(smp.dp_rank()).standard_normal((8, 6)).astype(np.float32)
    model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0)
    smp.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=model.optimizer), folder).save(5)
    model.save_model(f"{folder}/job.keras")
    return {"stages": sorted({shard.layout.stage for shard in model.get_weights().shards})}


def saved_by_one_rank(folder: str) -> None:
    """Rank 0 saves while rank 1 goes on training."""
    training = Training()
    manager = smp.CheckpointManager(training.checkpoint, folder)
    training.run([0])
    if smp.rank() == 0:
        manager.save()
    training.run([0])


class Cut(smp.DistributedModel):
    """A model of four layers, of which the plan puts the first alone on partition 0: half of the bytes would be two."""

    def __init__(self) -> None:
        super().__init__(name="cut")
        self.layers_of = [layers.Dense(6, activation="tanh", name=f"layer{number}") for number in range(4)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for number, layer in enumerate(self.layers_of):
            with smp.partition(smp.pp_size() - 1 if number else 0):
                x = layer(x)
        return x


def asked_before_a_step(folder: str, is_new: bool, is_thorough: bool = True) -> dict[str, Any]:
    """What is saved and listed of a model before its first step, after a restore and without; how it then goes on.

    Args:
        folder: for the checkpoint and the files.
        is_new: whether this job writes the checkpoint; else another layout has.
        is_thorough: whether to look at a model without a checkpoint as well.
    """
    tf_keras.backend.set_floatx("float64")
    x = np.random.default_rng(smp.dp_rank()).standard_normal((8, 6))

    def trained(model: Any) -> list[float]:
        return list(model.fit(x, x, batch_size=8, epochs=2, verbose=0).history["loss"])

    def made() -> tuple[Any, smp.CheckpointManager]:
        model = Cut()
        model.build((None, 6))
        model.compile(tf_keras.optimizers.Adam(0.01), loss="mse")
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        return model, smp.CheckpointManager(checkpoint, folder)

    def stages(weights: Any) -> list[int]:
        return [shard.layout.stage for shard in weights.shards] if smp.pp_size() > 1 else []

    found: dict[str, Any] = {}
    if is_new:
        model, manager = made()
        trained(model)
        manager.save()
        found["kept"] = list(model.get_weights())
        found["wanted"] = trained(model)
    if is_new and is_thorough:
        fresh, _ = made()
        first = fresh.get_weights()
        found["stages of fresh"] = stages(first)
        first = list(first)
        fresh.predict(x, verbose=0)
        found["initial"] = all(map(np.array_equal, first, fresh.get_weights()))
        found["stages by the plan"] = stages(fresh.get_weights())
    later, manager = made()
    manager.restore()
    listed = later.get_weights()
    found["stages"] = stages(listed)
    found["listed"] = list(listed)
    for path in ("early.h5", "early"):
        later.save_weights(f"{folder}/{path}")
    smp.barrier()
    plain = tf_keras.Sequential([layers.Dense(6, activation="tanh") for _ in range(4)])
    plain.build((None, 6))
    plain.load_weights(f"{folder}/early.h5")
    found["file"] = plain.get_weights()
    found["losses"] = trained(later)
    return found

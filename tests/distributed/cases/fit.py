"""Trains with `fit` in ways that differ from rank to rank, and says what came of it."""

from __future__ import annotations

import contextlib
import csv
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.job import runtime

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(44, 6).astype(np.float32)
CLASSES = RANDOM.randint(0, 3, 44)
SIZES = RANDOM.randn(44, 2).astype(np.float32)
WORDS = (RANDOM.randint(1, 9, (44, 5)) * (np.arange(5) < RANDOM.randint(1, 6, (44, 1)))).astype(np.int32)
TAGS = RANDOM.randint(0, 3, (44, 5))

FROM_LOGITS = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def two_outputs() -> tf_keras.Model:
    inputs = tf_keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh", name="first")(inputs)
    hidden = layers.Dense(8, activation="tanh", name="second", kernel_regularizer="l2")(hidden)
    outputs = [layers.Dense(3, name="kind")(hidden), layers.Dense(2, name="size")(hidden)]
    return tf_keras.Model(inputs, outputs, name="two")


def tagger() -> tf_keras.Model:
    inputs = tf_keras.Input((5,), dtype=tf.int32)
    words = layers.Embedding(9, 4, mask_zero=True, name="words")(inputs)
    states = layers.LSTM(6, return_sequences=True, name="states")(words)
    return tf_keras.Model(inputs, layers.Dense(3, name="tags")(states), name="tagger")


def dropping() -> tf_keras.Model:
    inputs = tf_keras.Input((6,))
    hidden = layers.Dropout(0.3)(layers.Dense(8, activation="relu", name="first")(inputs))
    return tf_keras.Model(inputs, layers.Dense(3, name="kind")(layers.Dense(8, name="second")(hidden)), name="dropping")


class OwnSteps(tf_keras.Model):
    """Steps that return more than metrics, and a metric that is the model's own."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.first, self.second = layers.Dense(8, name="first"), layers.Dense(3, name="second")
        self.seen = tf_keras.metrics.Mean(name="seen")

    @property
    def metrics(self) -> list[Any]:
        return [self.seen]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.compiled_loss(data[1], self(data[0], training=True))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.seen.update_state(loss)
        return {"seen": self.seen.result(), "loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        predicted = self(data[0], training=False)
        self.seen.update_state(self.compiled_loss(data[1], predicted))
        return {"seen": self.seen.result(), "largest": tf.reduce_mean(tf.reduce_max(predicted, -1))}

    def predict_step(self, data: Any) -> dict[str, Any]:
        predicted = self(data[0] if isinstance(data, tuple) else data)
        return {"class": tf.argmax(predicted, -1), "probability": tf.nn.softmax(predicted)}


TWO = {
    "loss": {"kind": FROM_LOGITS, "size": "mse"},
    "loss_weights": {"kind": 1.0, "size": 0.3},
    "metrics": {"kind": ["accuracy"], "size": ["mae"]},
}
KINDS: dict[str, Any] = {
    "two": (two_outputs, TWO, X, {"kind": CLASSES, "size": SIZES}),
    "masked": (tagger, {"loss": FROM_LOGITS, "weighted_metrics": ["accuracy"]}, WORDS, TAGS),
    "own": (OwnSteps, {"loss": FROM_LOGITS}, X, CLASSES),
    "dropout": (dropping, {"loss": FROM_LOGITS}, X, CLASSES),
}


def shard(value: Any) -> Any:
    """This replica's rows, so that the batches of all replicas together are those of one process.

    A batch of 8 of one process is, with two replicas, 4 rows for each.
    """
    replicas, replica = smp.dp_size(), smp.dp_rank()
    part = 8 // replicas

    def rows(array: np.ndarray) -> np.ndarray:
        wanted = [n for n in range(len(array)) if n % 8 // part == replica]
        return array[wanted]

    return tf.nest.map_structure(rows, value)


def model_of(kind: str) -> tuple[Any, Any, Any]:
    build, options, x, y = KINDS[kind]
    model = smp.DistributedModel(build)
    model.compile(optimizer=tf_keras.optimizers.Adam(0.01, global_clipnorm=0.5), **options)
    return model, shard(x[:40]), shard(tf.nest.map_structure(lambda v: v[:40], y))


def trained(kind: str) -> dict[str, Any]:
    """The history of three epochs of training alone."""
    model, x, y = model_of(kind)
    return {"history": model.fit(x, y, batch_size=8 // smp.dp_size(), epochs=3, shuffle=False, verbose=0).history}


def history(kind: str) -> dict[str, Any]:
    """The history of three epochs, and what `evaluate` and `predict` say then."""
    model, x, y = model_of(kind)
    size = 8 // smp.dp_size()
    fitted = model.fit(x, y, batch_size=size, epochs=3, shuffle=False, validation_data=(x, y), verbose=2)
    evaluated = model.evaluate(x, y, batch_size=size, return_dict=True)
    predicted = model.predict(KINDS[kind][2][:8], verbose=0)
    return {"history": fitted.history, "evaluated": evaluated, "predicted": tf.nest.flatten(predicted)}


def ragged(kind: str) -> dict[str, Any]:
    """The history of two epochs whose last batch has three samples, of which one of two replicas has one."""
    build, options, x, y = KINDS[kind]
    model = smp.DistributedModel(build)
    model.compile(optimizer=tf_keras.optimizers.Adam(0.01, global_clipnorm=0.5), **options)
    rows = tf.nest.map_structure(lambda value: value[:43], (x, y))
    data = smp.shard_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(8))
    return {"history": model.fit(data, epochs=2, validation_data=data, verbose=0).history}


def state_of(model: Any) -> list[np.ndarray]:
    """What this rank has of a model's weights and of its optimizer, which has slots for as many of them."""
    return [v.numpy() for v in [*model.local_trainable_variables, *model.optimizer.variables]]


class FirstBatch(tf_keras.callbacks.Callback):
    """Notes the state after the first batch."""

    state: list[np.ndarray] | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.state is None:
            self.state = state_of(self.model)


def changed_on_one() -> dict[str, Any]:
    """The state before a second `fit`, in which the last replica has changed all of it, and after its first batch."""
    model, x, y = model_of("two")
    given: dict[str, Any] = {"batch_size": 8 // smp.dp_size(), "epochs": 1, "shuffle": False, "verbose": 0}
    model.fit(x, y, **given)
    first = FirstBatch()
    if smp.dp_rank() == smp.dp_size() - 1:
        for variable in [*model.local_trainable_variables, *model.optimizer.variables]:
            variable.assign(variable + tf.cast(3, variable.dtype))
    before = state_of(model)
    model.fit(x, y, **given, callbacks=[first])
    return {"before": before, "after": first.state, "place": [smp.mp_rank(), smp.dp_rank()]}


class Seen(tf_keras.callbacks.Callback):
    """Notes what a callback sees."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(float(logs["loss"]))


def callbacks(folder: str) -> dict[str, Any]:
    """Every callback of Keras at once, and `model.summary` before and after it is decided who stores what."""
    model, x, y = model_of("two")
    summaries: list[list[str]] = [[], []]
    model.build((None, 6))
    model.summary(print_fn=summaries[0].append)
    root = Path(folder)
    seen = Seen()
    found: list[int] = []
    given = [
        seen,
        tf_keras.callbacks.CSVLogger(str(root / "log.csv")),
        tf_keras.callbacks.ModelCheckpoint(
            str(root / "best.weights.h5"), "loss", save_best_only=True, save_weights_only=True
        ),
        tf_keras.callbacks.ModelCheckpoint(str(root / "epoch-{epoch}"), save_weights_only=True),
        # A SavedModel takes long to write: the loss falls, so only the first epoch's is written.
        tf_keras.callbacks.ModelCheckpoint(str(root / "whole"), "loss", mode="max", save_best_only=True),
        tf_keras.callbacks.ModelCheckpoint(str(root / "whole.keras")),
        tf_keras.callbacks.TensorBoard(str(root / "board"), histogram_freq=1, write_images=True),
        tf_keras.callbacks.BackupAndRestore(str(root / "backup")),
        tf_keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0),
        tf_keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        tf_keras.callbacks.TerminateOnNaN(),
        tf_keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.append(epoch)),
        # The loss falls by less than 10, so the second epoch is no better, and the third the last.
        tf_keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=2, restore_best_weights=True),
        smp.callbacks.PipelineSummary(str(root / "pipeline")),
        smp.callbacks.Checkpoint(root / "checkpoints", max_to_keep=2),
    ]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        fitted = model.fit(x, y, batch_size=8 // smp.dp_size(), epochs=6, shuffle=False, callbacks=given)
    smp.barrier()
    model.summary(print_fn=summaries[1].append)
    with (root / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        "history": fitted.history,
        "batches": seen.batches,
        "epochs": found,
        "rows": [float(row["loss"]) for row in rows],
        "files": sorted(path.name for path in root.iterdir()),
        "printed": printed.getvalue(),
        "summary before": "\n".join(summaries[0]),
        "summary after": "\n".join(summaries[1]),
    }


class LeftError(Exception):
    """Raised in the middle of a training."""


class Leave(tf_keras.callbacks.Callback):
    """Leaves the training after some batches."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise LeftError


def interrupted(kind: str, folder: str, stop_after: int | None, save_freq: Any) -> dict[str, Any]:
    """Three epochs with a backup: up to a batch where an exception ends them, or from the backup there is."""
    model, x, y = model_of(kind)
    seen = Seen()
    given = [tf_keras.callbacks.BackupAndRestore(folder, save_freq=save_freq), seen]
    if stop_after is not None:
        given.append(Leave(stop_after))
    history: dict[str, Any] = {"loss": []}
    with contextlib.suppress(LeftError):
        fitted = model.fit(x, y, batch_size=8 // smp.dp_size(), epochs=3, shuffle=False, verbose=0, callbacks=given)
        history = fitted.history
    return {"losses": history["loss"], "batches": len(seen.batches), "left": Path(folder).exists()}


class Summarised(OwnSteps):
    """Writes a summary in its step, and draws random numbers after it."""

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            hidden = self.first(data[0])
            tf.summary.scalar("largest", tf.reduce_max(hidden), step=0)
            loss = self.compiled_loss(data[1], self.second(tf.nn.dropout(hidden, 0.3)))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


def summaries(folder: str | None) -> dict[str, Any]:
    """The losses, with a writer where a folder is given, which TensorBoard has on rank 0 alone."""
    model = smp.DistributedModel(Summarised)
    model.compile("sgd", FROM_LOGITS)
    given = [tf_keras.callbacks.TensorBoard(folder, update_freq=1)] if folder else []
    fitted = model.fit(X[:40], CLASSES[:40], batch_size=8, shuffle=False, verbose=0, callbacks=given)
    return {"losses": fitted.history["loss"]}


def unequal(known: bool) -> dict[str, Any]:
    """Replica 1 has one batch more than replica 0."""
    model = smp.DistributedModel(dropping)
    model.compile("sgd", FROM_LOGITS)
    count = 16 + 8 * smp.dp_rank()
    dataset = tf.data.Dataset.from_tensor_slices((X[:count], CLASSES[:count])).batch(8)
    if not known:
        dataset = dataset.filter(lambda x, y: True)
    try:
        model.fit(dataset, epochs=2, verbose=0)
    except smp.errors.RankMismatchError as error:
        return {"said": str(error)}
    return {"said": ""}


class Stop(tf_keras.callbacks.Callback):
    """Wants to stop on one rank only, as one that looks at a clock may."""

    def __init__(self, rank: int, batch: int = -1, epoch: int = -1) -> None:
        super().__init__()
        self.at = {"batch": batch, "epoch": epoch} if smp.rank() == rank else {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training |= batch == self.at.get("batch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training |= epoch == self.at.get("epoch")


def stopped_by_one(model: Any, x: Any, y: Any, **when: int) -> dict[str, Any]:
    """A training that one rank wants to stop."""
    seen = Seen()
    history = model.fit(
        x, y, batch_size=8 // smp.dp_size(), epochs=4, shuffle=False, verbose=0, callbacks=[seen, Stop(**when)]
    ).history
    return {"epochs": len(history["loss"]), "batches": len(seen.batches)}


class Batches(tf_keras.utils.Sequence):
    """Five batches."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return X[8 * index : 8 * index + 8], CLASSES[8 * index : 8 * index + 8]


def sequence(model: Any, **given: Any) -> list[float]:
    """The losses of the batches of a shuffled sequence, where ranks have drawn other random numbers before."""
    random.seed(smp.rank())
    seen = Seen()
    model.fit(Batches(), epochs=2, verbose=0, callbacks=[seen], **given)
    return seen.batches


def called_unlike(model: Any, x: Any, y: Any, **arguments: Any) -> str:
    """`fit` with a callback, and other arguments, that rank 0 alone has."""
    alone: dict[str, Any] = {"callbacks": [Seen(), tf_keras.callbacks.EarlyStopping("loss")], **arguments}
    try:
        model.fit(x, y, batch_size=8 // smp.dp_size(), verbose=0, **(alone if smp.rank() == 0 else {}))
    except smp.errors.RankMismatchError as error:
        return str(error)
    return ""


def of_one_model() -> dict[str, Any]:
    """Many a training of one model, whose step is traced once."""
    model, x, y = model_of("dropout")
    return {
        "stopped at an epoch": stopped_by_one(model, x, y, rank=1, epoch=1),
        "stopped at a batch": stopped_by_one(model, x, y, rank=0, batch=2),
        "with other loggers": called_unlike(model, x, y, callbacks=[]),
        "sequence": sequence(model),
        "of workers": sequence(model, workers=2),
        "unlike": called_unlike(model, x, y, epochs=3),
    }


def best_weights_stay() -> dict[str, Any]:
    """What a rank sends while EarlyStopping keeps and restores the best weights."""
    model, x, y = model_of("dropout")

    class Watched(tf_keras.callbacks.EarlyStopping):
        sent = 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            before = bytes_sent()
            super().on_epoch_end(epoch, logs)
            self.sent += bytes_sent() - before

    # The loss never falls by 10, so the first epoch stays the best.
    stopping = Watched("loss", min_delta=10.0, patience=2, restore_best_weights=True)
    size = 8 // smp.dp_size()
    kept = Kept()
    model.fit(x, y, batch_size=size, epochs=5, shuffle=False, verbose=0, callbacks=[kept, stopping])
    return {
        "sent": stopping.sent,
        "sent_in_all": bytes_sent() > 0,
        "held": [shard.value is not None for shard in stopping.best_weights.shards],
        "best": kept.weights,
        "now": [np.asarray(v) for v in model.local_variables],
        "epochs": stopping.stopped_epoch + 1,
    }


class Kept(tf_keras.callbacks.Callback):
    """Keeps what this rank stores after the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            self.weights = [np.array(v) for v in self.model.local_variables]


def bytes_sent() -> int:
    """What this rank has sent so far."""
    transport = runtime.current().transport
    assert transport is not None
    return sum(int(peer["sent_bytes"]) for peer in transport.stats()["peers"])

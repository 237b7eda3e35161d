"""Which callbacks all ranks need together, and which a rank may have alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.training import agreement


class Own(tf_keras.callbacks.Callback):
    """One of the script's."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks at every batch."""


class Stopping(tf_keras.callbacks.EarlyStopping):
    """One of Keras's that the script has changed."""


TOGETHER = {
    "Stopping": Stopping,
    "ReduceLROnPlateau": tf_keras.callbacks.ReduceLROnPlateau,
    "ModelCheckpoint": lambda: tf_keras.callbacks.ModelCheckpoint("best"),
    "TerminateOnNaN": tf_keras.callbacks.TerminateOnNaN,
    "TensorBoard": lambda: tf_keras.callbacks.TensorBoard("logs", histogram_freq=1),
    "Checkpoint": lambda: smp.callbacks.Checkpoint("checkpoints"),
    "PipelineSummary": smp.callbacks.PipelineSummary,
}
ALONE: list[Callable[[], Any]] = [
    Own,
    tf_keras.callbacks.LambdaCallback,
    lambda: tf_keras.callbacks.CSVLogger("log.csv"),
    lambda: tf_keras.callbacks.TensorBoard("logs"),
    tf_keras.callbacks.History,
]


@pytest.mark.parametrize("name", TOGETHER)
def test_what_changes_the_training_is_needed_on_all_ranks(init: Callable[..., None], name: str) -> None:
    init()
    assert agreement.acting([Own(), TOGETHER[name]()]) == [name]


def test_what_shows_or_logs_may_be_on_one_rank_alone(init: Callable[..., None]) -> None:
    init()
    assert agreement.acting([make() for make in ALONE]) == []


def test_alone_in_the_world_there_is_nobody_to_ask(init: Callable[..., None]) -> None:
    init()
    assert agreement.agree_on_fit({}, [Own()]) is None


@pytest.mark.parametrize(
    ("made", "each_batch"),
    [
        (Own, True),
        (lambda: tf_keras.callbacks.LambdaCallback(on_train_batch_end=print), True),
        (tf_keras.callbacks.LambdaCallback, False),
        (tf_keras.callbacks.TerminateOnNaN, False),
        (smp.callbacks.BroadcastInitialState, False),
    ],
)
def test_between_batches_ranks_ask_each_other_only_for_callbacks_of_the_scripts_own(
    made: Callable[[], Any], each_batch: bool
) -> None:
    assert agreement.decides_in_batches(made()) is each_batch


@pytest.mark.parametrize("each_batch", [False, True])
def test_a_progress_bar_that_rank_0_alone_has_makes_it_ask_nothing(
    each_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras calls every callback between batches where one of them has use for it: rank 0 alone waited."""
    asked: list[str] = []
    stop = agreement.StopTogether(each_batch)
    monkeypatch.setattr(stop, "_agree", asked.append)
    bar = tf_keras.callbacks.ProgbarLogger()
    bar.target = 1
    called = tf_keras.callbacks.CallbackList([bar, stop], model=tf_keras.Sequential(), verbose=1, steps=1, epochs=1)
    called.on_epoch_begin(0)
    asked.clear()
    called.on_train_batch_end(0, {"loss": 1.0})
    assert asked == (["the end of batch 1 of the training"] if each_batch else [])


class Fives(tf_keras.utils.Sequence):
    """Five batches."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return np.zeros([2, 1])


DATA: dict[str, tuple[Any, dict[str, Any], int | None]] = {
    "data set": (tf.data.Dataset.range(10).batch(4), {}, 3),
    "one without end": (tf.data.Dataset.range(10).repeat(), {}, None),
    "one of unknown length": (tf.data.Dataset.range(10).filter(lambda x: x > 3), {}, None),
    "what an epoch is said to have": (tf.data.Dataset.range(10), {"steps_per_epoch": 4}, None),
    "sequence": (Fives(), {}, 5),
    "arrays": ({"a": np.zeros([10, 3]), "b": np.zeros([10])}, {"batch_size": 4}, 3),
    "arrays in Keras's batches": (np.zeros([65, 3]), {}, 3),
    "arrays, but for a part": (np.zeros([65, 3]), {"validation_split": 0.5}, 1),
    "generator": ((x for x in range(3)), {}, None),
}


@pytest.mark.parametrize("name", DATA)
def test_the_batches_of_an_epoch_are_those_that_keras_runs(name: str) -> None:
    data, more, count = DATA[name]
    arguments = {"x": data, "batch_size": None, "steps_per_epoch": None, "validation_split": 0.0, **more}
    assert agreement.batches_of_an_epoch(arguments) == count
    if count is None:
        return
    seen: list[int] = []
    model = tf_keras.Sequential([tf_keras.layers.Input([1])])
    model.compile("sgd")

    def train(iterator: Any) -> dict[str, float]:
        next(iterator)
        seen.append(1)
        return {"loss": 0.0}

    model.make_train_function = lambda force=False: train
    model.train_function = train
    model.fit(**arguments, verbose=0)
    assert len(seen) == count

"""The loops of tf_keras: the data they take, and their callbacks.

Private pieces work with tf_keras 2.21. tests/smp_tf/keras/test_loops.py fails when they change.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import tf_keras
from tf_keras import callbacks as keras_callbacks
from tf_keras.src.utils import data_utils

from smp_tf.keras.patch import replaced
from smp_tf.keras.progress_lines import ProgressLines, is_written_over

_MODULE = keras_callbacks.Callback.__module__
#: The methods that every callback inherits.
_BASES = keras_callbacks.Callback.__mro__
#: Callbacks that only show or write the logs.
_OF_LOGS = (keras_callbacks.ProgbarLogger, keras_callbacks.CSVLogger, keras_callbacks.RemoteMonitor)
#: Callbacks that act alone: they write, show, or run functions of the script's.
_ALONE = (*_OF_LOGS, keras_callbacks.BaseLogger, keras_callbacks.History, keras_callbacks.LambdaCallback)


def is_sequence(data: Any) -> bool:
    """Returns whether data is given as a sequence of batches, which has a length."""
    return isinstance(data, tf_keras.utils.Sequence)


@contextlib.contextmanager
def workers_shuffle_with(shuffle: Callable[[list[Any]], None]) -> Iterator[None]:
    """Makes Keras shuffle with a function of ours, within its context, the order in which workers fetch a `Sequence`.

    Keras shuffles with `random.shuffle`, and uses nothing else of `random` in that module. This is so in tf_keras 2.16
    to 2.21.

    Args:
        shuffle: called in a thread per enqueuer, once per epoch.
    """
    with replaced((data_utils, "random", types.SimpleNamespace(shuffle=shuffle))):
        yield


def is_callback_list(callbacks: Any) -> bool:
    """Returns whether callbacks are given as Keras's own list of them."""
    return isinstance(callbacks, keras_callbacks.CallbackList)


def ask_for_batch_hooks(callbacks: Any) -> None:
    """Lets a list of callbacks find out again which of them are to be called for every batch, as when it was made."""
    for kind in ("train", "test", "predict"):
        wanted = any(getattr(callback, f"_implements_{kind}_batch_hooks")() for callback in callbacks.callbacks)
        setattr(callbacks, f"_should_call_{kind}_batch_hooks", wanted)


def wants_train_batches(callback: Any) -> bool:
    """Returns whether a callback is to be called after every batch of a training."""
    return bool(callback._implements_train_batch_hooks())


def is_of_keras(kind: type) -> bool:
    """Returns whether a class of callbacks is one of Keras's, except the one that all derive from."""
    return kind.__module__ == _MODULE and kind not in _BASES


def is_tensorboard(callback: Any) -> bool:
    """Returns whether a callback writes for TensorBoard."""
    return isinstance(callback, keras_callbacks.TensorBoard)


def is_backup(callback: Any) -> bool:
    """Returns whether a callback backs up the training, and restores it."""
    return isinstance(callback, keras_callbacks.BackupAndRestore)


def writes_logs(callback: Any) -> bool:
    """Returns whether a callback only shows or writes the logs."""
    return isinstance(callback, _OF_LOGS)


def progress_in_lines(callbacks: list[Any]) -> list[Any]:
    """Returns callbacks that show the progress in lines, where a bar cannot be written over and none is among them.

    Args:
        callbacks: those that run.
    """
    if is_written_over() or any(isinstance(callback, keras_callbacks.ProgbarLogger) for callback in callbacks):
        return []
    return [ProgressLines()]


def acts_alone(callback: Any) -> bool:
    """Returns whether a callback of Keras's only writes, shows or runs functions of the script's."""
    return isinstance(callback, _ALONE)


def runs_functions(callback: Any) -> bool:
    """Returns whether a callback of Keras's runs functions of the script's."""
    return isinstance(callback, keras_callbacks.LambdaCallback)

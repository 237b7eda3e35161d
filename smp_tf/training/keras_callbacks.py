"""Adapts Keras's own callbacks to several ranks, so that all decide alike and every file is written once.

`fit` runs on every rank, and so do its callbacks. Most of them only look at the logs, which are the same on all ranks.
These have to differ from rank to rank:

    ProgbarLogger, CSVLogger, RemoteMonitor   on rank 0 only: they show or write the logs
    TensorBoard                               writes on rank 0; the others take part where it looks at weights
    BackupAndRestore                          its place is taken by one that goes through `smp.CheckpointManager`
    ModelCheckpoint                           on all ranks, as it is: it calls `save`, which all ranks have to call
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.announce import tell
from smp_tf.checkpoint.manager import CheckpointManager
from smp_tf.checkpoint.rotation import delete_series
from smp_tf.errors import CheckpointError
from smp_tf.job import exchange, runtime
from smp_tf.keras import adapter
from smp_tf.keras.bases import Callback
from smp_tf.variables.fetch import WRITER, write_with_all_weights

#: The name of a backup's checkpoints, before their number.
_BACKUP = "backup"


def adapt(callbacks: Any, model: Any) -> Any:
    """Returns the callbacks that this rank runs instead of those that the script gave to `fit` and similar loops.

    Args:
        callbacks: None, a callback, a list of callbacks, or Keras's `CallbackList`, which is changed.
        model: the distributed model.

    Returns:
        A list, or the same `CallbackList`.
    """
    if adapter.loops().is_callback_list(callbacks):
        callbacks.callbacks[:] = _adapted(callbacks.callbacks)
        for callback in callbacks.callbacks:
            if callback.model is not model:
                callback.set_model(model)
        return callbacks
    return _adapted(as_list(callbacks))


def as_list(callbacks: Any) -> list[Any]:
    """Returns a script's callbacks (None, one or several) as a list."""
    if adapter.loops().is_callback_list(callbacks):
        return list(callbacks.callbacks)
    return tf.nest.flatten(callbacks) if callbacks else []


def before_all(callbacks: Any, first: Sequence[Any], model: Any) -> Any:
    """Returns the callbacks with others before them, except those whose class is among them already.

    Args:
        callbacks: the result of `adapt`.
        first: the callbacks to put before them.
        model: the distributed model.
    """
    is_list = isinstance(callbacks, list)
    present = callbacks if is_list else callbacks.callbacks
    wanted = [new for new in first if not any(isinstance(callback, type(new)) for callback in present)]
    present[:0] = wanted
    if not is_list:
        for callback in wanted:
            callback.set_model(model)
    return callbacks


def after_all(callbacks: Any, last: Any, model: Any) -> Any:
    """Returns the callbacks with one more after them. It replaces the one of an earlier `fit`.

    Args:
        callbacks: the result of `adapt`.
        last: the callback to put after them.
        model: the distributed model.
    """
    is_list = isinstance(callbacks, list)
    present = callbacks if is_list else callbacks.callbacks
    present[:] = [*(callback for callback in present if not isinstance(callback, type(last))), last]
    if not is_list:
        last.set_model(model)
        adapter.loops().ask_for_batch_hooks(callbacks)
    return callbacks


def _adapted(callbacks: Sequence[Any]) -> list[Any]:
    rank = runtime.current().topology.rank
    found = []
    for callback in callbacks:
        if adapter.loops().is_backup(callback):
            found.append(Backup(callback))
        elif adapter.loops().is_tensorboard(callback):
            found.append(_writing(callback) if rank == WRITER else TensorBoardFollower(callback))
        elif rank == WRITER or not adapter.loops().writes_logs(callback):
            found.append(callback)
    return found


def _writing(callback: Any) -> Any:
    """Returns TensorBoard's callback for the rank that writes, which may look at weights that other ranks store."""
    if "_log_weights" not in vars(callback):
        original = callback._log_weights

        @functools.wraps(original)
        def log_weights(epoch: int) -> None:
            write_with_all_weights(callback.model, _HISTOGRAMS, lambda: original(epoch))

        callback._log_weights = log_weights
    return callback


_HISTOGRAMS = "histograms of the weights, for TensorBoard"


class TensorBoardFollower(Callback):
    """Replaces TensorBoard's callback on ranks that do not write. It gives the weights that rank 0 asks for.

    Args:
        callback: the callback that the script gave.
    """

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self._callback = callback

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Does its part of what rank 0 does with all others: reads the weights, and saves the embeddings."""
        followed = self._callback
        if followed.histogram_freq and epoch % followed.histogram_freq == 0:
            write_with_all_weights(self.model, _HISTOGRAMS, lambda: None)
        if followed.embeddings_freq and epoch % followed.embeddings_freq == 0:
            self.model.save_weights(os.path.join(followed.log_dir, "train", f"keras_embedding.ckpt-{epoch}"))


class Backup(Callback):
    """Replaces Keras's `BackupAndRestore`. It does the same with `smp.CheckpointManager`.

    No rank holds what it does not store, and a backup is whole or does not exist. A training that was interrupted goes
    on after its last backup. When it ends by itself, the backup is deleted.

    Args:
        callback: the callback that the script gave.
    """

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self._directory = os.fspath(callback.backup_dir)
        self._every = callback.save_freq
        self._delete = callback.delete_checkpoint
        self._since_backup = 0
        self._epoch = tf.Variable(-1, dtype=tf.int64, name="backup_epoch")
        self._batch = tf.Variable(-1, dtype=tf.int64, name="backup_batch")

    def _implements_train_batch_hooks(self) -> bool:
        return self._every != "epoch"

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the backup, if there is one. Keras asks afterwards where to go on."""
        checkpoint = tf.train.Checkpoint(
            model=self.model, epoch=self._epoch, batch=self._batch, train_counter=self.model._train_counter
        )
        self._manager = CheckpointManager(checkpoint, self._directory, max_to_keep=1, checkpoint_name=_BACKUP)
        if self._manager.latest_checkpoint is not None:
            self._manager.restore()
        self.model._training_state = self

    def maybe_load_initial_counters_from_ckpt(
        self, steps_per_epoch: int | None, initial_epoch: int, mode: Any = None
    ) -> tuple[int, int]:
        """Returns where `fit` begins, as Keras asks it of `model._training_state`: (epoch, batch)."""
        epoch, batch = int(self._epoch), int(self._batch)
        if epoch < 0:
            return initial_epoch, 0
        if self._every == "epoch" or batch < 0 or batch + 1 == steps_per_epoch:
            return epoch + 1, 0
        return epoch, batch + 1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch.assign(epoch)
        self._batch.assign(-1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Backs up, if it is time after a number of batches."""
        if not isinstance(self._every, int) or isinstance(self._every, bool):
            return
        self._since_backup += 1
        if self._since_backup >= self._every:
            self._since_backup = 0
            self._batch.assign(batch)
            self._manager.save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Backs up, if this is done at the end of epochs."""
        if self._every == "epoch":
            self._manager.save()

    def on_train_end(self, logs: Any = None) -> None:
        """Deletes the backup once all ranks are here, and its folder if nothing else is in it."""
        del self.model._training_state
        if not self._delete:
            return
        exchange.barrier(name="the end of the training that is backed up")
        if runtime.current().topology.rank == WRITER:
            try:
                delete_series(self._directory, _BACKUP)
            except (OSError, CheckpointError) as error:
                tell(f"smp_tf: the backup in {self._directory} could not be deleted. {type(error).__name__}: {error}")
        exchange.barrier(name="the deletion of the backup")

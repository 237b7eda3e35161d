"""Makes ranks that train with `fit` begin with the same arguments, and stop together.

    rank 0: fit(epochs=3, [ModelCheckpoint])   rank 1: fit(epochs=3, [])     ─▶ an error before the first batch
    rank 0: model.stop_training = True         rank 1: goes on               ─▶ both stop

Most callbacks decide by the logs, which are the same on all ranks. A callback that looks at a clock, or at a file of
its host, does not. Nor does one that a script gives to rank 0 alone, as scripts for data parallelism do.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.errors import RankMismatchError
from smp_tf.job import exchange, runtime
from smp_tf.keras import adapter
from smp_tf.keras.bases import Callback
from smp_tf.partition.mesh import CommGroup
from smp_tf.training import callbacks as own_callbacks
from smp_tf.variables import assigned_values

#: Arguments of `fit` that decide the number of batches, or the evaluations.
_COMPARED = ("epochs", "initial_epoch", "steps_per_epoch", "validation_steps", "validation_freq")
_HINT = (
    "Call fit on every rank with the same arguments, and with the same callbacks of those that change the training or "
    "read weights: files are written once, by rank 0, all the same. Only callbacks that show or log may differ."
)


def agree_on_fit(arguments: Mapping[str, Any], callbacks: Sequence[Any]) -> StopTogether | None:
    """Raises an error unless all ranks call `fit` alike, where it matters. Every rank calls it before the first batch.

    Args:
        arguments: of `fit`, by name, with the defaults of those that were not given.
        callbacks: the callbacks that the script gave.

    Returns:
        The callback to put after all others; None where this process is alone.

    Raises:
        RankMismatchError: the ranks do not call it alike.
    """
    if runtime.current().topology.size == 1:
        return None
    told: dict[str, Any] = {name: _told(arguments[name]) for name in _COMPARED}
    told["validation"] = bool(_told(arguments["validation_split"])) or arguments["validation_data"] is not None
    told["callbacks"] = acting(callbacks)
    exchange.agree("how fit is called", told, hint=_HINT)
    _require_as_many_batches(arguments)
    each_batch = any(decides_in_batches(callback) for callback in callbacks)
    return StopTogether(any(exchange.allgather_json(each_batch, name="what callbacks fit has")))


def _require_as_many_batches(arguments: Mapping[str, Any]) -> None:
    """Raises an error where an epoch is known to have more batches on one replica than on another.

    Keras leaves an epoch of known length without asking for one more batch. For an unknown length, `training` notices
    the end of the data.
    """
    if runtime.current().topology.replicas == 1:
        return
    counts = exchange.allgather_json(
        batches_of_an_epoch(arguments), CommGroup.RDP_GROUP, name="how many batches the data given to fit has"
    )
    if len({count for count in counts if count is not None}) > 1:
        told = ", ".join(
            f"{'an unknown number' if count is None else count} on replica {replica}"
            for replica, count in enumerate(counts)
        )
        raise RankMismatchError(
            f"Every replica needs the same number of batches in an epoch, since each step averages the gradients of "
            f"all. The data given to fit has {told}. Divide it with smp.shard_dataset, or give fit steps_per_epoch."
        )


def batches_of_an_epoch(arguments: Mapping[str, Any]) -> int | None:
    """Returns how many batches an epoch of `fit` has on this rank, unless data of unknown length decides it.

    Args:
        arguments: of `fit`, by name.

    Returns:
        Their number; None where it is unknown or infinite, or is the argument `steps_per_epoch`.
    """
    data = arguments["x"]
    if arguments["steps_per_epoch"] is not None:
        return None
    if isinstance(data, tf.data.Dataset):
        count = int(data.cardinality())
        return count if count >= 0 else None
    if adapter.loops().is_sequence(data):
        return len(data)
    shapes = [value.shape for value in tf.nest.flatten(data) if hasattr(value, "shape")]
    if not shapes or not len(shapes[0]) or shapes[0][0] is None:
        return None
    samples = math.floor(int(shapes[0][0]) * (1.0 - float(arguments["validation_split"] or 0.0)))
    return math.ceil(samples / int(arguments["batch_size"] or 32))


def acting(callbacks: Sequence[Any]) -> list[str]:
    """Returns the classes of the callbacks that change the training, or take part in what all ranks do."""
    return [type(callback).__name__ for callback in callbacks if _acts(callback)]


class StopTogether(Callback):
    """Runs after all other callbacks. Where one rank wants to stop, all ranks stop.

    Args:
        each_batch: whether a callback of any rank may decide so between batches, and not only between epochs.
    """

    def __init__(self, each_batch: bool) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self._each_batch = each_batch
        self._count = 0

    def _implements_train_batch_hooks(self) -> bool:
        return self._each_batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Asks the others, since Keras leaves an epoch after its first batch where a callback wants to stop by now."""
        self._agree(f"the beginning of epoch {epoch + 1}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Asks the others, where this is needed."""
        # Keras calls it for all callbacks where one needs it, such as the progress bar, which only rank 0 has.
        if not self._each_batch:
            return
        self._count += 1
        self._agree(f"the end of batch {self._count} of the training")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Asks the others."""
        self._agree(f"the end of epoch {epoch + 1}")

    def _agree(self, place: str) -> None:
        mine = [bool(self.model.stop_training), assigned_values.left_out()]
        told = exchange.allgather_json(mine, name=f"the callbacks at {place}")
        assigned_values.compare([left for _, left in told])
        if any(wants for wants, _ in told):
            self.model.stop_training = True


def _acts(callback: Any) -> bool:
    if adapter.loops().is_tensorboard(callback):
        return bool(callback.histogram_freq or callback.embeddings_freq)
    return any(map(_is_known, type(callback).__mro__)) and not adapter.loops().acts_alone(callback)


def _is_known(kind: type) -> bool:
    """Returns whether a class of callbacks is Keras's or smp_tf's."""
    return kind.__module__ == own_callbacks.__name__ or adapter.loops().is_of_keras(kind)


def decides_in_batches(callback: Any) -> bool:
    """Returns whether a callback of the script's own runs between batches. Keras's own decide by the logs there."""
    is_own = adapter.loops().runs_functions(callback) or not _is_known(type(callback))
    return is_own and adapter.loops().wants_train_batches(callback)


def _told(value: Any) -> Any:
    """Returns an argument in the form in which it is compared. Numbers are compared by their values."""
    if isinstance(value, numbers.Number | np.generic):
        return float(value)  # type: ignore[arg-type]
    return None if value is None else repr(value)

"""Lets Keras's functions read weights of a split model on every rank, by telling all ranks the owners' values.

    K.get_value(model.gate)     layer.get_weights()     plain_model.get_weights()

All of these call `K.batch_get_value` or `K.get_value`. For variables of models these become collective: every rank of a
replica calls them. `variable.numpy()` reads what this rank stores, and tells no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.keras.patch import Patch
from smp_tf.partition.mesh import CommGroup
from smp_tf.variables import fetch, foreign_values, store


class ReadPatch(Patch):
    """Makes Keras's functions that read variables return other ranks' values on every rank."""

    def _replace(self) -> None:
        of_one, of_several = adapter.layers().readers_of_values()
        for module, name in of_one:
            self._wrap(module, name, _of_one)
        for module, name in of_several:
            self._wrap(module, name, _of_several)


#: In force from the first distributed model until `smp.shutdown`.
read_patch = ReadPatch()


def _of_one(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_value(x: Any) -> Any:
        return values([x])[0] if _is_collective([x]) else original(x)

    return get_value


def _of_several(original: Callable[..., Any]) -> Callable[..., Any]:
    def batch_get_value(tensors: Any) -> Any:
        wanted = list(tensors)
        return values(wanted) if _is_collective(wanted) else original(wanted)

    return batch_get_value


def _is_collective(wanted: Sequence[Any]) -> bool:
    """Returns whether one rank of the replica stores some of the variables, and this rank may ask for them."""
    running = runtime.current_or_none()
    if running is None or running.topology.stages == 1 or not tf.executing_eagerly():
        return False
    # While a file is written, one rank fetches the values. While a file is read, no rank needs them.
    if foreign_values.fetch() is not None or foreign_values.leaves_out():
        return False
    return any(_stage_of(value) is not None for value in wanted)


def _stage_of(value: Any) -> int | None:
    return store.stage_of(value) if hasattr(value, "handle") else None


def values(wanted: Sequence[Any]) -> list[Any]:
    """Returns the values of variables on every rank of the replica. All of them call it with the same variables.

    Args:
        wanted: variables of models, or other objects with a value.

    Raises:
        RankMismatchError: not every rank asks for them.
    """
    ranks = runtime.current().topology.members(CommGroup.PP_GROUP)
    stages = [_stage_of(value) for value in wanted]
    names = [value.name for value, stage in zip(wanted, stages, strict=True) if stage is not None]
    more = f" and {len(names) - 1} more variables" if len(names) > 1 else ""
    fetch.meet(f"reading the value of {names[0]!r}{more} on every rank")
    return [
        value.numpy() if stage is None else _as_numpy(fetch.told_by(ranks[stage], ranks, value, value.numpy))
        for value, stage in zip(wanted, stages, strict=True)
    ]


def _as_numpy(told: Any) -> Any:
    """Returns a value as `variable.numpy()` does: a scalar for a scalar, else an array that may be written to."""
    if not isinstance(told, np.ndarray):
        return told
    if not told.shape:
        return told[()]
    return told if told.flags.writeable else told.copy()

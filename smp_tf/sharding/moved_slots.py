"""Moves an optimizer's slots with a weight, from the rank that has kept the weight to the rank that stores it.

Keras makes slots for all trainable weights at the first `apply_gradients`, also for those without a gradient. So the
rank that keeps a weight which no step has used has slots for it, and they may have come from a checkpoint:

    keeper   _momentums [hidden, head]                    ──▶  [hidden]
    owner    _momentums [main]             slots of head  ──▶  [main, head]

Where replicas share slots, each replica of the owner takes its share of them: all, some rows, or nothing.

All ranks know an optimizer by its number, by the order in which optimizers were first given weights of a model.
"""

from __future__ import annotations

import itertools
import json
import weakref
from types import SimpleNamespace
from typing import Any

from smp_tf.errors import StepError
from smp_tf.job.channel import tag_of
from smp_tf.keras import adapter
from smp_tf.sharding import layouts
from smp_tf.variables import fetch

_numbers = itertools.count()
_number_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

_WHICH, _SLOT = tag_of("slots of a kept weight"), tag_of("slot of a kept weight")


def note_use(optimizer: Any) -> None:
    """Notes that an optimizer is given weights of a distributed model. All ranks do so in the same order."""
    inner = adapter.slots().innermost(optimizer)
    if inner not in _number_of:
        _number_of[inner] = next(_numbers)


def send(variable: Any, owner: int) -> None:
    """Sends the slots of a weight that this rank has kept, and keeps none of them.

    Args:
        variable: the weight.
        owner: the rank that stores it from now on.
    """
    found: dict[int, dict[str, Any]] = {}
    for optimizer, number in list(_number_of.items()):
        for _, name, slot in adapter.slots().slots(optimizer, [variable]):
            _require_lists(optimizer, variable)
            found.setdefault(number, {})[name] = slot
    said = [(number, sorted(found[number])) for number in sorted(found)]
    fetch.transport().send_bytes(owner, _WHICH, json.dumps(said).encode())
    for number, names in said:
        for name in names:
            fetch.transport().send_bytes(owner, _SLOT, fetch.as_bytes(found[number][name]))
    for optimizer, number in list(_number_of.items()):
        if number in found:
            adapter.slots().drop_slots(optimizer, variable)


def receive(variable: Any, keeper: int) -> None:
    """Makes the slots of a weight that this rank stores from now on, with the values that they had.

    Args:
        variable: the weight.
        keeper: the rank that has kept it.

    Raises:
        StepError: this rank does not know the optimizer.
    """
    optimizers = {number: optimizer for optimizer, number in _number_of.items()}
    for number, names in json.loads(bytes(fetch.transport().recv_bytes(keeper, _WHICH))):
        optimizer = optimizers.get(number)
        if optimizer is None:
            raise StepError(
                f"Rank {keeper} has slots of an optimizer for {variable.name!r}, which this rank stores from now on, "
                f"and this rank does not have that optimizer. Every rank must keep the same optimizers, and call their "
                f"apply_gradients in the same order."
            )
        _require_lists(optimizer, variable)
        # No step has used the weight, so the keeper has all of its slots. Their shares are decided here.
        slots, place = layouts.slots_of(variable, optimizer), layouts.here()
        rows = slots.rows_at(place)
        here = {}
        if slots.is_at(place) and adapter.slots().add_slots(optimizer, variable):
            here = {name: slot for _, name, slot in adapter.slots().slots(optimizer, [variable])}
        for name in names:
            received = fetch.transport().recv_bytes(keeper, _SLOT)
            if name in here:
                here[name].assign(_of_rows(received, variable, here[name], rows))


def _of_rows(received: memoryview, variable: Any, slot: Any, rows: tuple[int, int] | None) -> Any:
    """Returns the part of the keeper's slot, which is for the whole weight, that belongs into the slot here."""
    if rows is None or slot.shape != (rows[1] - rows[0], *variable.shape[1:]):
        return fetch.as_tensor(received, slot)
    return fetch.as_tensor(received, SimpleNamespace(shape=variable.shape, dtype=slot.dtype))[rows[0] : rows[1]]


def _require_lists(optimizer: Any, variable: Any) -> None:
    if not adapter.slots().can_move_slots(optimizer):
        raise StepError(
            f"A step uses {variable.name!r} for the first time, which another partition is to store, and the optimizer "
            f"{type(optimizer).__name__} has slots for it already. Slots of tf.keras.optimizers.legacy cannot follow. "
            f"Let one call of model.predict on the whole model run before the first training step: it decides where "
            f"all layers are. Or use the optimizer of tf.keras.optimizers."
        )

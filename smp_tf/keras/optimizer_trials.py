"""Tries out copies of an optimizer, to find how many slots it keeps, and whether it updates rows."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.keras import adapter, optimizer_reports
from smp_tf.keras.optimizer_methods import has_own_apply

#: The side of the matrix whose slots are counted.
_SIDE = 64
#: For the matrix that is updated whole and in two pieces: rows, rows of the first piece, columns, and number of
#: updates.
_ROWS, _BORDER, _COLUMNS, _UPDATES = 8, 3, 4, 9

#: Whether each optimizer updates some rows of a weight as it updates them within the whole.
_updates_rows: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

#: Copies of optimizers that are being tried out.
_trials: weakref.WeakSet[Any] = weakref.WeakSet()


def slots_of(optimizer: Any) -> float | None:
    """Returns how many slots an optimizer keeps for a variable, in sizes of the variable.

    A copy is built for a small variable. The optimizer itself stays as it is.

    Args:
        optimizer: any Keras optimizer.

    Returns:
        The number, such as 2.0 for Adam, with what it keeps besides slots; None where it cannot be copied, or does not
        say what it keeps.
    """
    given = adapter.slots().innermost(optimizer)
    try:
        with tf.init_scope():
            copy = type(given).from_config(given.get_config())
            variable = tf.Variable(tf.zeros([_SIDE, _SIDE]))
            adapter.slots().make_slots(copy, [variable])
    except Exception:
        # It is a user's class, and may do anything.
        return None
    found = adapter.slots().variables_of(copy)
    optimizer_reports.forget(copy)
    # An optimizer of smp_tf itself says what it keeps besides its slots.
    beside = given.slots_beside() if hasattr(given, "slots_beside") else 0.0
    return sum(slot.shape.num_elements() for slot in found if slot.shape.rank) / _SIDE**2 + beside


def is_on_trial(optimizer: Any) -> bool:
    """Returns whether an optimizer is a copy that is being tried out."""
    return optimizer in _trials


def updates_rows(optimizer: Any) -> bool:
    """Returns whether an optimizer updates some rows of a weight alone as it updates them within the whole.

    This is tried out when it is first asked, on copies: one updates a small matrix, another one its upper and its lower
    rows. Adafactor looks at columns, and does not pass. Nor does an optimizer that clips each gradient by its norm,
    cannot be copied, or changes nothing in some updates. Nor does one whose class has its own `apply_gradients`, since
    that may send something.

    Args:
        optimizer: any Keras optimizer.
    """
    inner = adapter.slots().innermost(optimizer)
    if inner not in _updates_rows:
        # Where only the signs of gradients count, the trial would not show that it clips.
        if getattr(inner, "clipnorm", None) or has_own_apply(inner):
            _updates_rows[inner] = False
            return False
        try:
            with tf.init_scope(), tf_internals.kept_trace():
                _updates_rows[inner] = _makes_the_same_of_rows(inner)
        except Exception:
            # It is a user's class, and may do anything.
            _updates_rows[inner] = False
    return _updates_rows[inner]


def _makes_the_same_of_rows(given: Any) -> bool:
    generator = np.random.default_rng(0)
    value = generator.normal(size=[_ROWS, _COLUMNS]).astype(np.float32)
    whole, pieces = [tf.Variable(value)], [tf.Variable(value[:_BORDER]), tf.Variable(value[_BORDER:])]
    config = given.get_config()
    if "learning_rate" in config:
        # The rate may be small, or grow from nothing.
        config["learning_rate"] = 0.1
    copies = []
    for _ in range(2):
        copies.append(type(given).from_config(dict(config)))
        _trials.add(copies[-1])
        if hasattr(copies[-1], "jit_compile"):
            copies[-1].jit_compile = False
    for _ in range(_UPDATES):
        # Large, and larger in some rows, so that clipping has an effect.
        gradient = (generator.normal(size=value.shape) * 10.0 ** np.arange(_ROWS)[:, None]).astype(np.float32)
        copies[0].apply_gradients([(tf.constant(gradient), whole[0])])
        parts = gradient[:_BORDER], gradient[_BORDER:]
        copies[1].apply_gradients([(tf.constant(part), piece) for part, piece in zip(parts, pieces, strict=True)])
    if np.array_equal(whole[0].numpy(), value):
        return False
    together = np.concatenate([piece.numpy() for piece in pieces])
    # Processors may round the last elements of a slice of memory differently.
    return bool(np.allclose(together, whole[0].numpy(), rtol=1e-5, atol=1e-6))

"""The Keras that answers what smp_tf asks, by subject.

    rooms above ──▶ layers()      a model's layers, their variables and calls
                    slots()       what an optimizer keeps
                    optimizers()  what an optimizer does
                    losses()      compiled losses and metrics           ◀── keras_2.py: tf_keras
                    loops()       `fit` and its like
                    archives()    files

`protocols.py` holds the questions. Only this room imports tf_keras and the modules that answer for it. A class that is
built upon one of Keras's must name it when it is defined, and takes it from `bases.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from smp_tf.keras.protocols import Adapter, Archives, Layers, Loops, Losses, Optimizers, Slots

_replacement: Adapter | None = None


def current() -> Adapter:
    """Returns the adapter in force, that of tf_keras. The first call imports tf_keras."""
    if _replacement is not None:
        return _replacement
    from smp_tf.keras.keras_2 import ADAPTER

    return ADAPTER


@contextlib.contextmanager
def in_force(adapter: Adapter) -> Iterator[None]:
    """Lets another Keras answer, in the whole process, within its context."""
    global _replacement
    before, _replacement = _replacement, adapter
    try:
        yield
    finally:
        _replacement = before


def layers() -> Layers:
    """Returns the part that knows layers and models."""
    return current().layers


def slots() -> Slots:
    """Returns the part that knows what optimizers keep."""
    return current().slots


def optimizers() -> Optimizers:
    """Returns the part that knows what optimizers do."""
    return current().optimizers


def losses() -> Losses:
    """Returns the part that knows compiled losses and metrics."""
    return current().losses


def loops() -> Loops:
    """Returns the part that knows Keras's loops and callbacks."""
    return current().loops


def archives() -> Archives:
    """Returns the part that knows the files of models."""
    return current().archives

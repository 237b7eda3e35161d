"""The host's memory, and whether there is another."""

from __future__ import annotations

import contextlib

import tensorflow as tf

#: TensorFlow's name of the host's processors and memory.
HOST = "/CPU:0"


def has_device() -> bool:
    """Returns whether this process computes on a device with memory of its own: without, all is on the host anyway."""
    return bool(tf.config.list_logical_devices("GPU"))


def on_device(name: str | None) -> contextlib.AbstractContextManager[object]:
    """Returns a context whose ops are on a device; None: where they would be without."""
    return contextlib.nullcontext() if name is None else tf.device(name)

"""Says whether a process has a device with its own memory besides the host's, and places ops."""

from __future__ import annotations

import contextlib

import tensorflow as tf

#: TensorFlow's name of the host's processors and memory.
HOST = "/CPU:0"


def has_device() -> bool:
    """Returns whether this process computes on a device with its own memory. Without one, all is on the host anyway."""
    return bool(tf.config.list_logical_devices("GPU"))


def on_device(name: str | None) -> contextlib.AbstractContextManager[object]:
    """Returns a context whose ops are on a device; None leaves their places unchanged."""
    return contextlib.nullcontext() if name is None else tf.device(name)

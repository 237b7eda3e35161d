"""Graphs that TensorFlow runs op for op as they are written, so that equal graphs give equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf


@contextmanager
def graphs_as_written() -> Iterator[None]:
    """Within this context TensorFlow fuses, folds and reorders no ops: how it does depends on what else a graph has."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
        )

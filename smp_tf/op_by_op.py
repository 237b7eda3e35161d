"""Keeps XLA's auto-clustering out of what a rank does between its tasks.

Auto-clustering (`tf.config.optimizer.set_jit(True)`) puts ops together that may run together as far as the graph of
one process tells, and what was put together begins when all of it can. That a tensor comes only when another rank has
had one of this rank's, no edge of the graph says:

    rank 0   norm of its own part ─▶ send ┐        ┌─▶ receive ─▶ scale the gradients
                                          └ rank 1 ┘
             └─────────── put together, this waits for itself ──────────────────────┘

The tasks themselves are functions of their own, whose ops are put together as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Keeps ops of the graph that is being traced out of XLA's clusters, as a context or a decorator.

    Example:
        >>> with tf.Graph().as_default(), op_by_op():
        ...     tf.constant(1.0).op.get_attr("_XlaCompile")
        False
    """
    if tf.executing_eagerly():
        yield
        return
    with tf.xla.experimental.jit_scope(compile_ops=False):
        yield

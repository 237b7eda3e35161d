"""Notes, as TensorFlow ops, when this rank comes to a collective outside the transport, and when it comes through.

    come_to("gradients_0")         after all that the collective needs
    with tf.control_dependencies(...): ...                 the collective, of Horovod
    come_through("gradients_0")    after what it gives

In a collective ranks wait for each other without a message. A rank that waits long must find out who has not come. So
the transport answers which collective a rank is in (`transport.Transport.ask`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.ops.graph_op import run_independently
from smp_tf.ops.library import tf_ops_library

__all__ = ["come_through", "come_to", "within"]


def come_to(name: str, after: Sequence[Any]) -> tf.Operation:
    """Notes, in the graph that is being traced, that this rank comes to a collective.

    The op is exempt from automatic control dependencies, as `send_recv.send` is, and runs once per execution of its
    function.

    Args:
        name: Name of the collective, the same on all ranks that take part.
        after: Ops and tensors of the graph that the collective waits for.

    Returns:
        The op, for `come_through`.
    """
    with tf.control_dependencies(list(after)):
        operation = tf_ops_library().smp_come_to(collective=name)
    run_independently(operation)
    return operation


def come_through(name: str, come: tf.Operation, after: Sequence[Any]) -> None:
    """Notes, in the graph that is being traced, that this rank has come through a collective.

    Args:
        name: The name that was given to `come_to`.
        come: The op that `come_to` returned.
        after: Ops and tensors of the graph that the collective gives.
    """
    with tf.control_dependencies([come, *after]):
        operation = tf_ops_library().smp_come_through(collective=name)
    run_independently(operation)


@contextlib.contextmanager
def within(name: str) -> Iterator[None]:
    """Notes that this rank is in a collective within the context, in eager mode.

    Args:
        name: Name of the collective, the same on all ranks that take part.
    """
    library = tf_ops_library()
    library.smp_come_to(collective=name)
    try:
        yield
    finally:
        library.smp_come_through(collective=name)

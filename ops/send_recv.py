"""Sends and receives of tensors between ranks, as TensorFlow ops.

    rank 0:  send(x, step, dest=1, program=p, edge=e, microbatch=m, label="...")
    rank 1:  y = recv(step, dtype, shape, src=0, program=p, edge=e, microbatch=m, label="...")

Both run asynchronously, so no executor thread is held while they wait. They meet by (source rank, program, step, edge,
microbatch), in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.ops.errors import NotDifferentiableError
from smp_tf.ops.graph_op import run_independently
from smp_tf.ops.library import tf_ops_library

__all__ = ["begin_step", "end_step", "recv", "send"]

#: Types whose elements have no fixed size. Tensors of all other types can be sent: numbers of any kind, and bools.
UNSENDABLE = frozenset({tf.resource, tf.string, tf.variant})


def send(
    tensor: Any, step: Any, *, dest: int, program: int, edge: int, microbatch: int, label: str
) -> tf.Operation | None:
    """Sends a tensor to a rank.

    In a graph the op is exempt from automatic control dependencies. If they were chained, sends and receives of two
    ranks would wait in a circle. It runs once per execution of its function. Order it by control dependencies where
    order matters.

    Args:
        tensor: Numbers of any kind or bools, of any shape, empty and scalar included.
        step: int64 scalar from `begin_step`.
        dest: Rank that receives.
        program: Number of the step function's program, the same on both ranks.
        edge: Number of the edge in the program's plan.
        microbatch: Number of the microbatch.
        label: Words for the tensor in messages.

    Returns:
        The op, or None in eager mode, where the call returns when the tensor is on its way.

    Raises:
        TypeError: Tensors of this dtype cannot be sent.
    """
    tensor = tf.convert_to_tensor(tensor)
    _check_dtype(tensor.dtype, "sent", label)
    operation = tf_ops_library().smp_send(
        tensor=tensor,
        step=tf.cast(step, tf.int64),
        dest=dest,
        program=program,
        edge=edge,
        microbatch=microbatch,
        label=label,
    )
    if tf.executing_eagerly():
        return None
    run_independently(operation)
    return operation


def recv(
    step: Any,
    dtype: Any,
    shape: Any,
    *,
    src: int,
    program: int,
    edge: int,
    microbatch: int,
    label: str,
) -> tf.Tensor:
    """Receives the tensor that a rank sends under the same names.

    It is exempt from automatic control dependencies, as `send` is.

    Args:
        step: int64 scalar from `begin_step`.
        dtype: Type of what the sender sends. Another type is an InvalidArgumentError that names both sides.
        shape: Shape as far as it is known, with None for unknown dimensions. It is checked, too.
        src: Rank that sends.
        program: The program number that `send` has.
        edge: The edge number that `send` has.
        microbatch: The microbatch that `send` has.
        label: Words for the tensor in messages.

    Returns:
        The tensor, with the static shape given.

    Raises:
        TypeError: Tensors of this dtype cannot be received.
    """
    dtype = tf.as_dtype(dtype)
    _check_dtype(dtype, "received", label)
    tensor = tf_ops_library().smp_recv(
        step=tf.cast(step, tf.int64),
        T=dtype,
        shape=tf.TensorShape(shape),
        src=src,
        program=program,
        edge=edge,
        microbatch=microbatch,
        label=label,
    )
    if not tf.executing_eagerly():
        run_independently(tensor.op)
    return tensor


def begin_step(handles: Sequence[Any], program: int) -> tf.Tensor:
    """Begins a step. The op is the fence before everything that the step does.

    Steps run one after the other, in the order in which they are in the program, whatever they touch.

    Args:
        handles: Resource tensors of the variables that the step reads or writes. Automatic control dependencies put the
            fence after their earlier uses.
        program: Number of the step function's program.

    Returns:
        int64 scalar: the step's number, from 0. It grows by one at every execution in this process.
    """
    return tf_ops_library().smp_begin(handles=[*handles, _order()], program=program)


def end_step(program: int) -> tf.Operation | None:
    """Ends a step. The op is the fence after everything that the step does, and before the next step.

    Args:
        program: Number of the step function's program.

    Returns:
        The op, or None in eager mode.
    """
    operation = tf_ops_library().smp_end(handles=[_order()], program=program)
    return None if tf.executing_eagerly() else operation


@functools.cache
def _order() -> tf.Tensor:
    """Returns a resource that every step touches and nothing ever reads. It keeps steps in order."""
    # The device of the fences.
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="smp_tf_order_of_steps")


def _check_dtype(dtype: tf.DType, verb: str, label: str) -> None:
    if dtype in UNSENDABLE:
        raise TypeError(
            f"Only numbers and bools can be {verb} between ranks. Received: {label!r} of dtype "
            f"{dtype.name}. Keep the ops that make and use it on one rank."
        )


def _refuse_gradient(operation: tf.Operation, *_: Any) -> Any:
    raise NotDifferentiableError(
        f"{operation.type} {operation.name!r} has no gradient: a gradient does not cross ranks by "
        "itself. Differentiate before the graph is split, and send the gradient as its own tensor."
    )


for _name in ("SmpSend", "SmpRecv"):
    tf.RegisterGradient(_name)(_refuse_gradient)

"""Tensors that a function gives to the graph that calls it before it ends, as TensorFlow ops.

    in the function     give_early(gradient, step, program=p, number=0)        where the gradient is made
    next to its call    gradient = take_early(step, dtype, shape, program=p, number=0)

TensorFlow hands over the outputs of a function when all of it has run. These are there as soon as they are made, for
what needs them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.ops.graph_op import run_independently
from smp_tf.ops.library import tf_ops_library

__all__ = ["give_early", "take_early"]


def give_early(tensor: tf.Tensor, step: tf.Tensor, *, program: int, number: int) -> tf.Operation:
    """Gives a tensor to the graph that calls the function which is being traced.

    The op is exempt from automatic control dependencies, as `send_recv.send` is, and runs once per execution.

    Args:
        tensor: Of any type.
        step: int64 scalar, of `send_recv.begin_step`: another one in every execution.
        program: Number of the step function's program.
        number: Counts what the program gives early.

    Returns:
        The op. The tensor is kept until it is taken, or given under another step.
    """
    operation = tf_ops_library().smp_give_early(tensor=tensor, step=step, program=program, number=number)
    run_independently(operation)
    return operation


def take_early(
    step: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape | Sequence[Any] | None, *, program: int, number: int
) -> tf.Tensor:
    """Takes what a function gives early, in the graph that calls it.

    The op waits for the tensor, without a thread, until it is given or the step has failed. It is exempt from automatic
    control dependencies.

    Args:
        step: As for `give_early`.
        dtype: Of the tensor.
        shape: What is known of its shape.
        program: As for `give_early`.
        number: As for `give_early`.

    Returns:
        The tensor, not copied.
    """
    tensor = tf_ops_library().smp_take_early(step=step, T=dtype, shape=shape, program=program, number=number)
    run_independently(tensor.op)
    return tensor

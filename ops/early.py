"""Hands tensors from a function to the graph that calls it before the function ends, by TensorFlow ops.

    in the function     give_early(gradient, step, program=p, number=0)        where the gradient is made
    next to its call    gradient = take_early(step, dtype, shape, program=p, number=0)

TensorFlow hands over the outputs of a function when all of it has run. These tensors are there as soon as they are
made, for the ops that need only them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.ops.graph_op import run_independently
from smp_tf.ops.library import tf_ops_library

__all__ = ["give_early", "take_early"]


def give_early(tensor: tf.Tensor, step: tf.Tensor, *, program: int, number: int) -> tf.Operation:
    """Gives a tensor from the function that is being traced to the graph that calls it.

    The op is exempt from automatic control dependencies, as `send_recv.send` is, and runs once per execution.

    Args:
        tensor: A tensor of any type.
        step: int64 scalar from `send_recv.begin_step`. It is another one in every execution.
        program: Number of the step function's program.
        number: Number of the tensor among those that the program gives early.

    Returns:
        The op. The tensor is kept until it is taken, or until it is given again in another step.
    """
    operation = tf_ops_library().smp_give_early(tensor=tensor, step=step, program=program, number=number)
    run_independently(operation)
    return operation


def take_early(
    step: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape | Sequence[Any] | None, *, program: int, number: int
) -> tf.Tensor:
    """Takes a tensor that a function gives early, in the graph that calls it.

    The op waits for the tensor, without a thread, until it is given or the step has failed. It is exempt from automatic
    control dependencies.

    Args:
        step: The step number that `give_early` has.
        dtype: Type of the tensor.
        shape: What is known of the tensor's shape.
        program: Number of the step function's program.
        number: The number of the tensor.

    Returns:
        The tensor, not copied.
    """
    tensor = tf_ops_library().smp_take_early(step=step, T=dtype, shape=shape, program=program, number=number)
    run_independently(tensor.op)
    return tensor

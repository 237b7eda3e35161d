"""Hands tensors of a running step to the script, in the steps for which it asks, by TensorFlow ops.

    want("losses", True)                       the script asks
    keep([tensor], "losses", microbatch=0)     an op of the step, which holds the tensor
    take("losses", 0, [tf.float32])            the script gets it, once
    want("losses", False)                      from now on the op does nothing

A tensor is held by reference, so nothing is copied. A step that is not asked frees it as it would without the op.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from smp_tf.ops.graph_op import add_op, run_independently
from smp_tf.ops.library import tf_ops_library

__all__ = ["keep", "take", "want"]


def keep(values: Sequence[tf.Tensor], key: str, *, microbatch: int) -> tf.Operation:
    """Adds an op that holds tensors for the script in the runs for which the script has asked.

    The op is exempt from automatic control dependencies, and runs once per execution of its function.

    Args:
        values: tensors of the graph that is being traced, of any types and shapes; at least one.
        key: the key by which the script asks for them.
        microbatch: which microbatch of the step they belong to.

    Returns:
        The op.
    """
    tf_ops_library()
    attr = tf.compat.v1.AttrValue
    types = attr(list=attr.ListValue(type=[value.dtype.as_datatype_enum for value in values]))
    operation = add_op(
        tf.compat.v1.get_default_graph(),
        "SmpKeep",
        values,
        [],
        {"T": types, "key": attr(s=key.encode()), "microbatch": attr(i=microbatch)},
    )
    run_independently(operation)
    return operation


def want(key: str, wanted: bool) -> None:
    """Asks for the tensors of a key from now on, or no longer. Tensors that are already held for it are dropped.

    Args:
        key: the key of the steps' ops.
        wanted: whether tensors are to be held.
    """
    with tf.init_scope():
        tf_ops_library().smp_want_kept(key=key, wanted=wanted)


def take(key: str, microbatch: int, dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Returns the tensors that a step holds for a key and a microbatch. It returns them once.

    Args:
        key: the key that was asked for.
        microbatch: which microbatch of the step.
        dtypes: the tensors' types.

    Returns:
        The tensors, on the device on which the step made them.

    Raises:
        tf.errors.NotFoundError: no step has run since they were asked for.

    Example:
        >>> want("losses", True)
        >>> step()
        >>> take("losses", 0, [tf.float32])
        [<tf.Tensor: shape=(), dtype=float32, numpy=0.5>]
    """
    library = tf_ops_library()
    devices = sorted((device.name for device in tf.config.list_logical_devices()), key=lambda name: "GPU" not in name)
    with tf.init_scope():
        for device in devices[:-1]:
            with tf.device(device):
                try:
                    return list(library.smp_take_kept(key=key, microbatch=microbatch, T=list(dtypes)))
                except tf.errors.FailedPreconditionError:
                    continue
        with tf.device(devices[-1]):
            return list(library.smp_take_kept(key=key, microbatch=microbatch, T=list(dtypes)))

"""Sums a tensor over the microbatches of a step, where its summands are made.

    step begins      ─▶ zeros
    B0, B1, ... BM-1 ─▶ += gradient          (inside the segment's function: the gradient is freed at once)
    after BM-1       ─▶ sum, handed on; the storage goes with it

If the summands were returned and added in the surrounding graph, a whole set of gradients would exist next to the sum.
The graph would also grow by one op per weight and microbatch.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from smp_tf.ops.graph_op import add_op, run_independently
from smp_tf.partition import tf_internals
from smp_tf.partition.graph.op_graph import TensorType
from smp_tf.pipeline.run.host import HOST, has_device, on_device

#: All share one name, since TensorFlow makes and keeps a kernel for each new name, which takes a millisecond.
_NAME = "smp_sum"


class Accumulator:
    """The sum of one tensor over the microbatches.

    Its storage is its own resource variable, made outside the graph that is being traced, and empty between steps. A
    model has one for each of its weights, so its ops are added without TensorFlow's wrappers (`ops/graph_op.py`).

    Args:
        kind: type of the tensor. Its shape is fully known.
        name: name for the message where the shape is not known.
        device: TensorFlow's name of the device of the sum; None for the graph's device, or the host (`device_of_sum`).
    """

    def __init__(self, kind: TensorType, name: str, device: str | None = None) -> None:
        if not fits(kind):
            raise ValueError(f"Only tensors of known shape are added up in place. Received: {name!r} of type {kind}.")
        self._shape = tf.TensorShape(kind.shape)
        self._dtype = tf.dtypes.as_dtype(kind.dtype)
        self._device = device_of_sum(self._dtype, device)
        with tf.init_scope(), on_device(self._device):
            self._empty = tf.constant([0], tf.int32)
            nothing = tf.zeros([0], self._dtype)
            self._variable = tf_internals.make_plain_variable(
                initial_value=nothing, trainable=False, shape=tf.TensorShape(None), name=_NAME
            )

    def clear(self, after: tf.Operation) -> tf.Operation:
        """Makes the op that begins a sum. It runs after another op."""
        shape = self._add_op("Const", [], tf.int32, dtype=_type(tf.int32), value=_shape_value(self._shape))
        with tf.control_dependencies([after]), on_device(self._device):
            # Not tf.zeros, which would be folded into constants (see `_nothing`).
            zeros = self._add_op("Empty", [shape], self._dtype, dtype=_type(self._dtype), init=_truth(True))
        run_independently(zeros.op)
        return self._assign(zeros, after)

    def add(self, value: tf.Tensor) -> tf.Operation:
        """Makes the op that adds a tensor, within a function being traced."""
        inputs = [self._handle(), value]
        return add_op(tf_internals.current_graph(), "AssignAddVariableOp", inputs, [], {"dtype": _type(self._dtype)})

    def _add_op(self, kind: str, inputs: list[tf.Tensor], made: tf.DType, **attributes: Any) -> tf.Tensor:
        return add_op(tf_internals.current_graph(), kind, inputs, [made], attributes).outputs[0]

    def _handle(self) -> tf.Tensor:
        """Returns the storage, for the graph that is being traced."""
        return tf_internals.capture(tf_internals.current_graph(), self._variable.handle)

    def take(self, after: tf.Operation) -> tuple[tf.Tensor, tf.Operation]:
        """Makes the ops that hand the sum on and then free its storage.

        Args:
            after: the op that makes the last summand.

        Returns:
            The sum, and the op that frees the storage.
        """
        with tf.control_dependencies([after]):
            value = self._add_op("ReadVariableOp", [self._handle()], self._dtype, dtype=_type(self._dtype))
        value.set_shape(self._shape)
        run_independently(value.op)
        return value, self._assign(self._nothing(), value.op)

    def _assign(self, value: tf.Tensor, after: tf.Operation) -> tf.Operation:
        # XLA's auto-clustering does not compile it, since compiled ops cannot change a variable's shape. The value is
        # made outside the context. Inside, the control edge would go to a constant, and TensorFlow would drop it when
        # it folds constants.
        attributes = {"dtype": _type(self._dtype), "validate_shape": _truth(False), "_XlaCompile": _truth(False)}
        with tf.control_dependencies([after]):
            inputs = [self._handle(), value]
            op = add_op(tf_internals.current_graph(), "AssignVariableOp", inputs, [], attributes)
        run_independently(op)
        return op

    def _nothing(self) -> tf.Tensor:
        # Its shape is captured. While the graph is traced that is a constant, and in the function made of it an
        # argument. A [0] written in the function would be one constant for all sums. TensorFlow's optimizer (seen in
        # 2.21) takes all values that are assigned to one handle to be equal in shape. So it would take the shapes of
        # different sums for each other, and clip_by_norm would lose its reduction.
        with on_device(self._device):
            empty = tf_internals.capture(tf_internals.current_graph(), self._empty)
            return self._add_op("Empty", [empty], self._dtype, dtype=_type(self._dtype), init=_truth(False))


@functools.cache
def _type(dtype: tf.DType) -> Any:
    return tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)


@functools.cache
def _truth(value: bool) -> Any:
    return tf.compat.v1.AttrValue(b=value)


def _shape_value(shape: tf.TensorShape) -> Any:
    return tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(shape.as_list(), tf.int32, [shape.rank]))


def device_of_sum(dtype: tf.DType, device: str | None) -> str | None:
    """Returns the device for the sum of tensors that are wanted on a device. None stands for the graph's device.

    TensorFlow 2.21 adds complex numbers to a variable only on processors. It would look in the host's memory for a
    variable on a GPU, which ends the process.
    """
    if device is None and dtype.is_complex and has_device():
        return HOST
    return device


def fits(kind: TensorType) -> bool:
    """Returns whether tensors of a type can be added up in place: they are numbers of known shape."""
    dtype = tf.dtypes.as_dtype(kind.dtype)
    return kind.is_static and (dtype.is_floating or dtype.is_complex or dtype in (tf.int32, tf.int64))

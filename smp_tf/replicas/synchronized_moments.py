"""Mean and variance over the samples of all replicas, for layers of Keras and Horovod that ask for them.

    replica 0   samples ─▶ sum, count ──┐ +            squares of distances ──┐ +
    replica 1   samples ─▶ sum, count ──┴───▶ mean ──▶ squares of distances ──┴───▶ variance

In a step, such a layer sees a microbatch. Its mean and variance are those of the microbatches with the same number on
all replicas together. Each sample counts the same, however many of them a replica has. They are computed as plain
Keras computes them of one batch: first the mean, then distances from it. (The square of the mean taken from the mean of
squares, as Keras and Horovod do over processes, loses digits.)

Keras's method asks `tf.distribute`, and Horovod's divides by the number of processes, among which are the stages of a
model. So both are replaced while a step is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.collectives.horovod_layers import methods_of_moments
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.keras.patch import Patch
from smp_tf.ops.replica_sum import sum_over_replicas
from smp_tf.variables.model_context import step_being_traced

#: Takes a vector and returns its sum over the replicas.
Total = Callable[[tf.Tensor], tf.Tensor]
#: Types in which sums of many samples overflow, or lose digits.
_SHORT = (tf.float16, tf.bfloat16)


class MomentsPatch(Patch):
    """Makes layers that ask for moments over all processes take them over the replicas, while a step is traced."""

    def _replace(self) -> None:
        for owner, name in (*adapter.layers().methods_of_synchronized_moments(), *methods_of_moments()):
            self._wrap(owner, name, _over_replicas)


#: In force from the first distributed model until `smp.shutdown`.
moments_patch = MomentsPatch()


def _over_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    def moments(layer: Any, inputs: tf.Tensor, reduction_axes: Any, keep_dims: bool, mask: Any = None) -> Any:
        if step_being_traced() is None:
            return original(layer, inputs, reduction_axes, keep_dims, mask=mask)
        label = f"moments of {layer.name}"
        is_alone = runtime.current().topology.replicas == 1

        def total(vector: tf.Tensor) -> tf.Tensor:
            return vector if is_alone else sum_over_replicas(vector, label)

        with tf.name_scope("moments"):
            return moments_of(inputs, reduction_axes, total, mask=mask, keep_dims=keep_dims, label=label)

    return moments


def moments_of(
    x: tf.Tensor, axes: Sequence[int], total: Total, *, mask: tf.Tensor | None, keep_dims: bool, label: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and the variance of what all replicas have.

    Args:
        x: what this one has.
        axes: the dimensions over which they are taken.
        total: takes a vector and returns its sum over the replicas.
        mask: what counts, without the last dimension; None for all.
        keep_dims: whether these dimensions stay, with length 1.
        label: words for the moments, in messages.

    Raises:
        StepError: how many moments there are depends on the number of samples.
    """
    y = tf.cast(x, tf.float32) if x.dtype in _SHORT else x
    weights = None
    if mask is not None:
        weights = tf.broadcast_to(tf.expand_dims(tf.cast(mask, y.dtype), -1), tf.shape(y))
    shape = tf.TensorShape([1 if number in axes else length for number, length in enumerate(y.shape)])
    if not shape.is_fully_defined():
        raise StepError(
            f"The {label} are to be taken over all replicas, and how many there are depends on the number of samples, "
            f"which may differ between replicas (shape {shape}). Leave out virtual_batch_size, or synchronized."
        )

    def summed(values: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.reduce_sum(values if weights is None else values * weights, axes), [-1])

    if weights is None:
        lengths = tf.gather(tf.shape(y), list(axes))
        count = tf.reshape(tf.cast(tf.reduce_prod(lengths), y.dtype), [1])
    else:
        count = tf.reshape(tf.reduce_sum(weights, axes), [-1])
    sums, counts = tf.split(total(tf.concat([summed(y), count], 0)), [shape.num_elements(), -1])
    mean = tf.reshape(tf.math.divide_no_nan(sums, counts), shape)
    # The derivative by this mean is zero, since the distances add up to nothing.
    squares = tf.math.squared_difference(y, tf.stop_gradient(mean))
    variance = tf.reshape(tf.math.divide_no_nan(total(summed(squares)), counts), shape)
    if not keep_dims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)

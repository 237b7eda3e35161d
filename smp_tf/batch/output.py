"""What a step returns: for every tensor its values over the microbatches, and ways to combine them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.batch import sparse_rows
from smp_tf.batch.output_description import GradientSum, OutputDescription
from smp_tf.errors import StepError
from smp_tf.replicas.gradient_marks import Computed, mark


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """The sum of a gradient over the microbatches (and replicas), each times its weight.

    Args:
        value: the sum.
        weight: the sum of the weights in it.
        computed: where it was made in the graph that is being traced; None outside a graph.
    """

    value: Any
    weight: Any
    computed: Computed | None = None

    def divided(self, device: str | None) -> Any:
        """Returns the average: the sum divided by its weight.

        Args:
            device: the device that computes it; None for TensorFlow's choice.
        """
        if device is not None:
            with tf.device(device):
                return self.divided(None)
        factor = 1.0 / (self.weight if isinstance(self.weight, int) else tf.cast(self.weight, tf.float64))
        return _scaled(self.value, factor)


class StepOutput:
    """One tensor that a step returns, over all microbatches.

    Steps make them, and scripts combine their values.

    Args:
        description: what is known of it for any batch.
        values: one tensor per microbatch; None where this rank does not have them.
        weights: weight of each microbatch in averages (its number of samples).
        total: the sum of a gradient, where the pipeline has accumulated it; else None.

    Example:
        >>> gradients, loss = forward_backward(images, labels)
        >>> len(loss.outputs)  # there are two microbatches
        2
        >>> loss.reduce_mean().shape
        TensorShape([])
    """

    def __init__(
        self,
        description: OutputDescription,
        values: Sequence[Any] | None,
        weights: Sequence[Any],
        total: WeightedSum | None = None,
    ) -> None:
        self._description = description
        self._values = values
        self._weights = weights
        self._total = total

    def __repr__(self) -> str:
        name, holder = self._description.name, self._description.holder
        return f"<StepOutput {name} of {len(self._weights)} microbatches{holder}>"

    @property
    def is_local(self) -> bool:
        """Returns whether this rank has the value; for a gradient, the result of `accumulate`."""
        return self._description.holder.is_here

    @property
    def follows_state(self) -> bool:
        """Returns whether it was computed from a variable that the step writes, so that its last value counts."""
        return self._description.follows_state

    @property
    def outputs(self) -> list[Any]:
        """Returns the values, one tensor per microbatch, in order.

        Raises:
            StepError: the value stays on another rank, or is a gradient, and only its sum was kept.
        """
        if self._values is not None:
            return [self._marked(value) for value in self._values]
        name, stage, gradient = self._description.name, self._description.holder.stage, self._description.gradient
        if gradient is not None and gradient.has_values:
            raise StepError(
                f"{name} is a gradient of a weight that partition {stage} stores; this rank does not have its values. "
                f"Check .is_local first."
            )
        if gradient is not None:
            raise StepError(
                f"{name} is a gradient: the pipeline keeps only its sum over the microbatches, not one value for "
                f"each. Use .accumulate(), or decorate the step with @smp.step(keep_microbatch_gradients=True)."
            )
        raise StepError(
            f"{name} stays on partition {stage} (it is among local_outputs); this rank does not have it. Check "
            f".is_local first, or take it out of local_outputs."
        )

    def accumulate(self, method: str = "variable", var: tf.Variable | None = None) -> Any:
        """Returns the average over the microbatches, weighted by their number of samples.

        Args:
            method: "variable", "add_n" or "accumulate_n". It is accepted for compatibility. The pipeline always
                accumulates values as they are made.
            var: a variable to assign the average to.

        Returns:
            A tensor (sparse slices stay sparse); None for a gradient that another rank has. That is the gradient of a
            weight which another stage stores or, with shard_optimizer_state, another replica updates.

        Raises:
            StepError: the method is unknown.

        Example:
            >>> gradients, loss = forward_backward(images, labels)
            >>> averages = [gradient.accumulate() for gradient in gradients]
        """
        if method not in ("variable", "add_n", "accumulate_n"):
            raise StepError(
                f'accumulate takes method "variable", "add_n" or "accumulate_n". Received: method={method!r}'
            )
        average = self.reduce_mean()
        if var is not None and average is not None:
            var.assign(average)
        return average

    def reduce_mean(self) -> Any:
        """Returns the average over the microbatches, weighted by their samples.

        Integers average to floats.

        Returns:
            A tensor of a microbatch's shape (sparse slices stay sparse); None for a gradient that another rank has.

        Raises:
            StepError: the value stays on another rank (`local_outputs`).

        Example:
            >>> gradients, loss = forward_backward(images, labels)
            >>> average = loss.reduce_mean()
        """
        gradient = self._description.gradient
        if gradient is None:
            return _weighted_mean([_as_float(v) for v in self.outputs], self._weights)
        if not self._description.holder.is_here:
            return None
        if self._total is None:
            return self._marked(_weighted_mean([_as_float(v) for v in self.outputs], self._weights))
        return self._marked(self._average(self._total, gradient))

    def _average(self, total: WeightedSum, gradient: GradientSum) -> Any:
        """Returns the average of a gradient, marked with what it is an average of."""
        return mark(total.divided(gradient.device), spread=gradient.spread, computed=total.computed)

    def _marked(self, value: Any) -> Any:
        """Returns the value, marked as a gradient where it is one."""
        return mark(value, is_of_step=True) if self._description.gradient is not None else value

    def reduce_sum(self) -> Any:
        """Returns the sum over the microbatches, unweighted.

        Returns:
            A tensor of a microbatch's shape (sparse slices stay sparse; truth values are counted, as int32); None for
            a gradient that another rank has.

        Raises:
            StepError: the value stays on another rank, or is a gradient, and only its weighted sum was kept.

        Example:
            >>> correct = predict(images, labels)["correct"].reduce_sum()
        """
        is_here, is_gradient = self._description.holder.is_here, self._description.gradient is not None
        if is_gradient and not is_here and self._values is None:
            return None
        if self._total is not None and _all_one(self._weights):
            return self._marked(self._total.value)
        return self._marked(_sum(self.outputs))

    def concat(self) -> Any:
        """Returns the microbatches joined along axis 0, in order.

        Scalars are stacked.

        Returns:
            A tensor with as many rows as all microbatches have together. Ragged and sparse tensors stay so, and sparse
            slices (`tf.IndexedSlices`) become slices of the joined tensor.

        Raises:
            StepError: the value stays on another rank, or is a gradient, and only its sum was kept.

        Example:
            >>> predict(images, labels)["classes"].concat().shape
            TensorShape([8])
        """
        values = self.outputs
        if isinstance(values[0], tf.IndexedSlices):
            return self._marked(sparse_rows.joined(values, self._description.name))
        if isinstance(values[0], tf.SparseTensor):
            return tf.sparse.concat(0, values)
        return tf.stack(values) if values[0].shape.rank == 0 else tf.concat(values, axis=0)

    def merge(self) -> Any:
        """Returns the batch as if it had not been split.

        It does the same as `concat`.

        Returns:
            The result of `concat`.

        Raises:
            StepError: the value stays on another rank, or is a gradient, and only its sum was kept.

        Example:
            >>> predictions = predict(images, labels)["classes"].merge()
        """
        return self.concat()

    def stack(self) -> Any:
        """Returns the microbatches stacked along a new axis 0.

        They must have one shape.

        Returns:
            A tensor with one row per microbatch. Ragged and sparse tensors stay so. Sparse slices (`tf.IndexedSlices`)
            become a `tf.SparseTensor`, since slices have no axis before that of their rows.

        Raises:
            StepError: the value stays on another rank, or is a gradient, and only its sum was kept.

        Example:
            >>> gradients, loss = forward_backward(images, labels)
            >>> loss.stack().shape
            TensorShape([2])
        """
        values = self.outputs
        if isinstance(values[0], tf.IndexedSlices):
            return sparse_rows.stacked(values, self._description.name)
        if isinstance(values[0], tf.SparseTensor):
            return tf.sparse.concat(0, [tf.sparse.expand_dims(v, 0) for v in values])
        return tf.stack(values, axis=0)


def of_batch(output: StepOutput, value: Any) -> StepOutput:
    """Returns the output of a step whose only microbatch is the batch.

    Args:
        output: the output over microbatches.
        value: its value for the batch; anything where another rank has it.
    """
    known, own, total = output._description, output._total, None
    if known.gradient is not None:
        known = dataclasses.replace(known, gradient=dataclasses.replace(known.gradient, has_values=True))
        total = WeightedSum(value, 1, own.computed if own is not None else None)
    return StepOutput(known, [value], [1], total) if output.is_local else StepOutput(known, None, [1])


def _all_one(weights: Sequence[Any]) -> bool:
    return all(isinstance(w, (int, float)) and w == 1 for w in weights)


def _as_float(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return value
    if value.dtype.is_integer or value.dtype == tf.bool:
        return tf.cast(value, tf.float32)
    return value


def _scaled(value: Any, factor: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(value.values, factor), value.indices, value.dense_shape)
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.map_values(lambda values: _scaled(values, factor), value)
    if isinstance(factor, float):
        # tf.cast would make it a float32 first, whatever the value's type.
        return value if factor == 1.0 else value * tf.constant(factor, value.dtype)
    return value * tf.cast(factor, value.dtype)


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([v.values for v in values], 0), tf.concat([v.indices for v in values], 0), values[0].dense_shape
        )
    if values[0].dtype == tf.bool:
        values = [tf.cast(v, tf.int32) for v in values]
    if isinstance(values[0], tf.SparseTensor):
        return functools.reduce(tf.sparse.add, values)
    # Neither add_n nor a chain of sums, which TensorFlow may turn into one, since their order differs from rank to
    # rank.
    return tf.reduce_sum(tf.stack(values), axis=0) if len(values) > 1 else values[0]


def _weighted_mean(values: Sequence[Any], weights: Sequence[Any]) -> Any:
    if all(isinstance(w, (int, float)) for w in weights):
        total = float(sum(weights))
        if len(set(weights)) == 1:
            return _scaled(_sum(values), 1.0 / len(weights))
        return _sum([_scaled(v, w / total) for v, w in zip(values, weights, strict=True)])
    floats = [tf.cast(w, tf.float64) for w in weights]
    total = tf.add_n(floats)
    return _sum([_scaled(v, w / total) for v, w in zip(values, floats, strict=True)])

"""What a step returns: for every tensor its values over the microbatches, and ways to put them together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.batch import sparse_rows
from smp_tf.errors import StepError
from smp_tf.replicas.gradient_marks import Computed, mark, mark_averaged, mark_computed, mark_rows, mark_unaveraged
from smp_tf.variables.host_offload import beside_gradients


class StepOutput:
    """One tensor returned by a step, over all microbatches.

    Steps make them; scripts put their values together.

    Args:
        name: what it is, for messages.
        values: one tensor per microbatch; None where this rank does not have them.
        weights: weight of each microbatch in averages (its number of samples).
        total: sum over microbatches (and replicas) of weight x value, where the pipeline accumulated it; else None.
        total_weight: the sum of the weights in `total`.
        owner: the partition that keeps the value when it is not sent to all; else None.
        is_local: whether this rank has it.
        replica: the replica that alone gets the sum of a gradient over the replicas; None where all of them do.
        rows: of which rows of a weight `total` is; None: of all.
        computed: where a gradient's sum was made, in the graph that is being traced.
        is_gradient: whether it was computed from gradients.
        is_kept: whether a gradient's values were kept besides their sum.
        is_unaveraged: whether `total` is of this replica alone, and `total_weight` its share of that of all.
        follows_state: whether it was computed from a variable that the step writes.

    Example:
        >>> gradients, loss = forward_backward(images, labels)
        >>> len(loss.outputs)  # there are two microbatches
        2
        >>> loss.reduce_mean().shape
        TensorShape([])
    """

    def __init__(
        self,
        name: str,
        values: Sequence[Any] | None,
        weights: Sequence[Any],
        *,
        total: Any = None,
        total_weight: Any = None,
        owner: int | None = None,
        is_local: bool = True,
        replica: int | None = None,
        rows: tuple[int, int] | None = None,
        computed: Computed | None = None,
        is_gradient: bool = False,
        is_kept: bool = False,
        is_unaveraged: bool = False,
        follows_state: bool = False,
    ) -> None:
        self._name = name
        self._values = None if values is None else list(values)
        self._weights = list(weights)
        self._total = total
        self._total_weight = total_weight
        self._owner = owner
        self._is_local = is_local
        self._replica = replica
        self._rows = rows
        self._computed = computed
        self._is_gradient = is_gradient
        self._is_kept = is_kept
        self._is_unaveraged = is_unaveraged
        self._follows_state = follows_state

    def __repr__(self) -> str:
        where = "" if self._is_local else f", on partition {self._owner}"
        if not self._is_local and self._replica is not None:
            where += f" of replica {self._replica}"
        return f"<StepOutput {self._name} of {len(self._weights)} microbatches{where}>"

    @property
    def is_local(self) -> bool:
        """Whether this rank has the value: of a gradient, what `accumulate` gives."""
        return self._is_local

    @property
    def follows_state(self) -> bool:
        """Whether it was computed from a variable that the step writes, so that its last value is that of the batch."""
        return self._follows_state

    @property
    def outputs(self) -> list[Any]:
        """The values: one tensor per microbatch, in order.

        Raises:
            StepError: the value stays on another rank, or is a gradient of which only the sum was kept.
        """
        if self._values is not None:
            return [self._marked(value) for value in self._values]
        if self._is_gradient and self._is_kept:
            raise StepError(
                f"{self._name} is a gradient of a weight that partition {self._owner} stores; this rank does not have "
                f"its values. Check .is_local first."
            )
        if self._is_gradient:
            raise StepError(
                f"{self._name} is a gradient: the pipeline keeps only its sum over the microbatches, not one value for "
                f"each. Use .accumulate(), or decorate the step with @smp.step(keep_microbatch_gradients=True)."
            )
        raise StepError(
            f"{self._name} stays on partition {self._owner} (it is among local_outputs); this rank does not have it. "
            f"Check .is_local first, or take it out of local_outputs."
        )

    def accumulate(self, method: str = "variable", var: tf.Variable | None = None) -> Any:
        """Returns the average over the microbatches, weighted by their number of samples.

        Args:
            method: "variable", "add_n" or "accumulate_n"; accepted for compatibility, the pipeline accumulates as
                the values are made in any case.
            var: a variable to assign the average to.

        Returns:
            A tensor (sparse slices stay sparse); None for a gradient that another rank has: that of a weight which
            another stage stores or, with shard_optimizer_state, another replica updates.

        Raises:
            StepError: an unknown method.

        Example:
            >>> gradients, loss = forward_backward(images, labels)
            >>> averages = [gradient.accumulate() for gradient in gradients]
        """
        if method not in ("variable", "add_n", "accumulate_n"):
            raise StepError(
                f'accumulate takes method "variable", "add_n" or "accumulate_n". Received: method={method!r}'
            )
        if self._is_gradient and not self._is_local:
            return None
        average = self.reduce_mean()
        if var is not None:
            var.assign(average)
        return average

    def reduce_mean(self) -> Any:
        """Returns the average over the microbatches, weighted by their number of samples; integers average to floats.

        Returns:
            A tensor of a microbatch's shape (sparse slices stay sparse); None for a gradient that another rank has.

        Raises:
            StepError: the value stays on another rank (`local_outputs`).

        Example:
            >>> gradients, loss = forward_backward(images, labels)
            >>> average = loss.reduce_mean()
        """
        if self._is_gradient and not self._is_local:
            return None
        return self._marked(self._average())

    def _average(self) -> Any:
        if self._total is not None:
            noted = mark_unaveraged if self._is_unaveraged else mark_averaged
            with beside_gradients():
                weight = self._total_weight
                factor = 1.0 / (weight if isinstance(weight, int) else tf.cast(weight, tf.float64))
                average = noted(_scaled(self._total, factor))
            if self._rows is not None:
                mark_rows(average, self._rows)
            return mark_computed(average, self._computed) if self._computed is not None else average
        return _weighted_mean([_as_float(v) for v in self.outputs], self._weights)

    def _marked(self, value: Any) -> Any:
        """Returns the value, known as a gradient where it is one."""
        return mark(value) if self._is_gradient else value

    def reduce_sum(self) -> Any:
        """Returns the sum over the microbatches, unweighted.

        Returns:
            A tensor of a microbatch's shape (sparse slices stay sparse; truth values are counted, as int32); None for
            a gradient that another rank has.

        Raises:
            StepError: the value stays on another rank, or is a gradient of which only the weighted sum was kept.

        Example:
            >>> correct = predict(images, labels)["correct"].reduce_sum()
        """
        if self._is_gradient and not self._is_local and self._values is None:
            return None
        if self._total is not None and _all_one(self._weights):
            return self._marked(self._total)
        return self._marked(_sum(self.outputs))

    def concat(self) -> Any:
        """Returns the microbatches joined along axis 0, in order; scalars are stacked.

        Returns:
            A tensor with as many rows as all microbatches have together. Ragged and sparse tensors stay so, and sparse
            slices (`tf.IndexedSlices`) become slices of the joined tensor.

        Raises:
            StepError: the value stays on another rank, or is a gradient of which only the sum was kept.

        Example:
            >>> predict(images, labels)["classes"].concat().shape
            TensorShape([8])
        """
        values = self.outputs
        if isinstance(values[0], tf.IndexedSlices):
            return self._marked(sparse_rows.joined(values, self._name))
        if isinstance(values[0], tf.SparseTensor):
            return tf.sparse.concat(0, values)
        return tf.stack(values) if values[0].shape.rank == 0 else tf.concat(values, axis=0)

    def merge(self) -> Any:
        """Returns the batch as if it had not been split: the same as `concat`.

        Returns:
            See `concat`.

        Raises:
            StepError: the value stays on another rank, or is a gradient of which only the sum was kept.

        Example:
            >>> predictions = predict(images, labels)["classes"].merge()
        """
        return self.concat()

    def stack(self) -> Any:
        """Returns the microbatches stacked along a new axis 0; they need one shape.

        Returns:
            A tensor with one row per microbatch. Ragged and sparse tensors stay so; sparse slices (`tf.IndexedSlices`)
            become a `tf.SparseTensor`, since slices know no axis before that of their rows.

        Raises:
            StepError: the value stays on another rank, or is a gradient of which only the sum was kept.

        Example:
            >>> gradients, loss = forward_backward(images, labels)
            >>> loss.stack().shape
            TensorShape([2])
        """
        values = self.outputs
        if isinstance(values[0], tf.IndexedSlices):
            return sparse_rows.stacked(values, self._name)
        if isinstance(values[0], tf.SparseTensor):
            return tf.sparse.concat(0, [tf.sparse.expand_dims(v, 0) for v in values])
        return tf.stack(values, axis=0)


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
    # Not add_n, nor a chain of sums that TensorFlow may turn into one: their order differs from rank to rank.
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

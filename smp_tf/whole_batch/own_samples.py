"""Which samples of a whole batch are those of this replica, and how these are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.batch.microbatches import sizes_of
from smp_tf.collectives.interface import order
from smp_tf.job import runtime
from smp_tf.whole_batch.joined_tail import join_rows


@dataclass(frozen=True)
class OwnSamples:
    """The samples of a replica in the batch of all replicas.

    Args:
        sizes: samples of the replicas' batches, in their order.
        replica: number of this one.
        microbatches: how many microbatches are asked for.
    """

    sizes: Sequence[int]
    replica: int
    microbatches: int

    @property
    def total(self) -> int:
        """Returns the samples of all replicas."""
        return sum(self.sizes)

    @property
    def count(self) -> int:
        """Returns the samples of this replica."""
        return self.sizes[self.replica]

    @property
    def begin(self) -> int:
        """Returns how many samples come before those of this replica."""
        return sum(self.sizes[: self.replica])

    def rows_of(self, value: Any) -> Any:
        """Returns the rows of this replica's samples.

        Args:
            value: a tensor with one row, or as many for each, of the samples of all replicas.
        """
        if len(self.sizes) == 1:
            return value
        each = value.shape[0] // self.total
        return value[each * self.begin : each * (self.begin + self.count)]

    @property
    def parts(self) -> tuple[int, ...]:
        """Returns the samples of this replica's microbatches."""
        return tuple(sizes_of(self.count, min(self.count, self.microbatches)))


@dataclass(frozen=True, eq=False)
class GatheredSamples:
    """The samples of a replica in the batch of all replicas, whose sizes are gathered when the step runs.

    Args:
        count: the samples of this replica.
        begin: how many samples come before those of this replica, a scalar.
        total: the samples of all replicas, a scalar.
    """

    count: int
    begin: tf.Tensor
    total: tf.Tensor

    def rows_of(self, value: Any) -> tf.Tensor:
        """Returns the rows of this replica's samples.

        Args:
            value: a tensor with one row of the samples of all replicas.
        """
        rows = value[self.begin : self.begin + self.count]
        return tf.ensure_shape(rows, [self.count, *value.shape[1:]])


def gathered_samples(count: Any, only: int | None = None, step: str = "") -> GatheredSamples:
    """Returns the samples of this replica in the batch of all replicas. They call it together.

    Args:
        count: the samples of this replica, a number or a scalar.
        only: the samples that all replicas have to have together; None for any number, on all of them.
        step: words for the step.
    """
    own = tf.stack([tf.cast(count, tf.int32), only or 0])[tf.newaxis]
    [told] = join_rows([(own, 0)], 1, "smp_samples_of_all", message_order())
    sizes, wanted = told[:, 0], told[:, 1]
    total = tf.reduce_sum(sizes)
    if only is not None:
        message = (
            f"{step} has whole_batch=True, and needs the number of samples as a number of Python, such as x.shape[0]. "
            f"So the replicas' batches must add up to as many samples as in the first step. Use tf.shape(x)[0], or "
            f"batches of one size (drop_remainder=True)."
        )
        # All replicas see what each of them needs. So all end with the error.
        with tf.control_dependencies([tf.debugging.assert_equal(wanted, total, message)]):
            total = tf.identity(total)
    return GatheredSamples(count, tf.reduce_sum(sizes[: runtime.current().topology.replica]), total)


def message_order() -> list[Any]:
    """Returns what lets messages of one name come one after the other, in the graph that is being traced."""
    return [] if tf.executing_eagerly() else [order().handle]

"""Joins sparse gradients (`tf.IndexedSlices`) of a batch over all replicas: slices of every microbatch in a row.

    replica 0   microbatches  3 7 │ 1     ──▶ rows 3 7 1 ──┐
    replica 1   microbatches  2   │ 7 7   ──▶ rows 2 7 7 ──┴──▶ rows 3 7 1 2 7 7 on both

Every slice is multiplied by the weight of its microbatch, so that together they stand for the weighted sum, as a dense
gradient does. Nothing is made dense, since a table of embeddings may be larger than all else; unless the slices of all
replicas are larger than the table (`sum_of_slices`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.collectives.interface import order
from smp_tf.replicas.sparse_sums import sum_of_slices


def weighted_sum(parts: Sequence[tf.IndexedSlices], weights: Sequence[Any], name: str) -> tf.IndexedSlices:
    """Returns the sum of weight x gradient over the microbatches of all replicas.

    Args:
        parts: the gradient for each microbatch of this replica.
        weights: the weight of each: numbers or scalar tensors.
        name: unique name of the operation, equal on the ranks of this stage.

    Returns:
        The slices of all replicas, or the rows of their sum, as `sum_of_slices` returns them. They are the same on
        each.
    """
    # The operations of one step come after those of the step before, since they have the same names.
    handles = [] if tf.executing_eagerly() else [order().handle]
    return sum_of_slices(own_weighted_sum(parts, weights), name, handles)


def own_weighted_sum(parts: Sequence[tf.IndexedSlices], weights: Sequence[Any]) -> tf.IndexedSlices:
    """Returns the sum of weight x gradient over the microbatches of this replica.

    Args:
        parts: the gradient for each microbatch.
        weights: the weight of each: numbers or scalar tensors.
    """
    values = [part.values * tf.cast(weight, part.values.dtype) for part, weight in zip(parts, weights, strict=True)]
    indices = [part.indices for part in parts]
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), parts[0].dense_shape)

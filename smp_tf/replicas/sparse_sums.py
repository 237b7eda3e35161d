"""Sums sparse gradients (`tf.IndexedSlices`) over microbatches and replicas, sent as slices or as a table.

    replica 0   microbatches  3 7 │ 1     ──▶ rows 3 7 1 ──┐
    replica 1   microbatches  2   │ 7 7   ──▶ rows 2 7 7 ──┴──▶ rows 3 7 1 2 7 7 on both

Every slice is multiplied by the weight of its microbatch, so that together they stand for the weighted sum, as a dense
gradient does. A table of embeddings may be larger than all else, so nothing is made dense as long as that sends less:

    replica 0   rows 3 7 ──┐ gathered      rows 3 7 2 7 7   while all slices together are few
    replica 1   rows 2 7 7 ┴──────▶
    replica 0   table ──┐ added up         rows 2 3 7       when they are more than twice the table: a ring sends
    replica 1   table ──┴─────────▶                         what is gathered once, and what is added up twice

The result is slices in both cases. Rows that no replica has touched are left out, so an optimizer that skips such rows
does so in both cases. The number of slices depends on the batch, and each replica has its own. They tell each other
their numbers first, so that all make the same choice.

Where there is a GPU, gathered slices are added up row by row on the host, in the same order on all replicas. A GPU adds
slices of one row in no fixed order. An optimizer that added them there would round differently on each replica, and the
weights would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.collectives import wire_types
from smp_tf.collectives.interface import collectives, order
from smp_tf.config.keys import ONE_BIT
from smp_tf.job import runtime
from smp_tf.pipeline.run.host import HOST, has_device
from smp_tf.replicas import sums
from smp_tf.replicas.two_byte_floats import COMPRESSED

#: Bytes of a compressed element, for all kinds of compression but one bit.
_COMPRESSED_SIZE = 2
#: The number that says that a row was touched.
_TOUCHED = tf.int32


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


def sum_of_slices(slices: tf.IndexedSlices, name: str, handles: Sequence[Any] = ()) -> tf.IndexedSlices:
    """Returns slices for the sum over the replicas of the tensors that the slices of each replica stand for.

    Args:
        slices: any number of slices of this replica.
        name: unique name of the operation, equal on the ranks of the group.
        handles: resource tensors of variables, at least one within a function. The op comes after their earlier uses,
            and ends before later ones.

    Returns:
        The slices of all replicas, in their order (with a GPU each row once), or the rows of their sum, in order. With
        one replica they are the slices themselves.
    """
    if runtime.current().process_sets.dp is None:
        return slices
    if slices.dense_shape is None:
        return _gathered(slices, name, handles)
    count = tf.cast(tf.size(slices.indices), tf.int64)
    [total] = sums.sum_over_replicas([count], f"{name}_rows", handles=handles)
    values, indices = tf.cond(
        _is_table_less(slices, total),
        lambda: _parts(_added_up(slices, name, handles)),
        lambda: _parts(_gathered(slices, name, handles)),
    )
    values = tf.ensure_shape(values, [None, *slices.values.shape[1:]])
    return tf.IndexedSlices(values, tf.ensure_shape(indices, [None]), slices.dense_shape)


def _parts(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    return slices.values, slices.indices


def _is_table_less(slices: tf.IndexedSlices, total: tf.Tensor) -> tf.Tensor:
    """Returns whether adding up the table sends less, given the number of slices of all replicas."""
    dtype = slices.values.dtype
    width = tf.cast(tf.reduce_prod(tf.shape(slices.values)[1:]), tf.int64)
    slice_bytes = width * dtype.size + slices.indices.dtype.size
    # And a number that says whether the row was touched.
    row_bytes = width * _size_in_sum(_summed_as(dtype)) + _TOUCHED.size
    return 2 * tf.cast(slices.dense_shape[0], tf.int64) * row_bytes < total * slice_bytes


def _summed_as(dtype: tf.DType) -> tf.DType:
    """Returns the type in which the rows of many slices are added up, of at least four bytes."""
    return tf.float32 if dtype.size < 4 else dtype


def _size_in_sum(dtype: tf.DType) -> int:
    """Returns the bytes of an element of a dense gradient on its way."""
    kind = runtime.current().config.gradient_compression
    is_compressed = kind not in (None, ONE_BIT) and dtype in COMPRESSED
    return _COMPRESSED_SIZE if is_compressed else int(dtype.size)


def _added_up(slices: tf.IndexedSlices, name: str, handles: Sequence[Any]) -> tf.IndexedSlices:
    dtype, rows = slices.values.dtype, slices.dense_shape[0]
    values = tf.cast(slices.values, _summed_as(dtype))
    table = tf.math.unsorted_segment_sum(values, slices.indices, rows)
    touched = tf.math.unsorted_segment_max(tf.ones_like(slices.indices, _TOUCHED), slices.indices, rows)
    # The maximum of no elements is the smallest number of the type. This is sent apart from the table, since compressed
    # values have their own scale.
    touched = tf.maximum(touched, 0)
    [total] = sums.sum_gradients([table], f"{name}_table", handles=handles)
    [anywhere] = sums.sum_over_replicas([touched], f"{name}_touched", handles=handles)
    indices = tf.reshape(tf.where(anywhere > 0), [-1])
    rows_there = tf.cast(tf.gather(total, indices), dtype)
    return tf.IndexedSlices(rows_there, tf.cast(indices, slices.indices.dtype), slices.dense_shape)


def _gathered(slices: tf.IndexedSlices, name: str, handles: Sequence[Any]) -> tf.IndexedSlices:
    group = runtime.current().process_sets.dp
    wire_types.moved_as(slices.values.dtype, f"the slices of {name!r}")
    values = collectives().all_gather(slices.values, group, f"{name}_values", handles=handles)
    indices = collectives().all_gather(slices.indices, group, f"{name}_indices", handles=handles)
    found = tf.IndexedSlices(values, indices, slices.dense_shape)
    return _once_a_row(found) if has_device() else found


def _once_a_row(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    dtype = slices.values.dtype
    with tf.device(HOST):
        indices, places = tf.unique(slices.indices)
        values = tf.cast(slices.values, _summed_as(dtype))
        rows = tf.cast(tf.math.unsorted_segment_sum(values, places, tf.size(indices)), dtype)
    return tf.IndexedSlices(rows, indices, slices.dense_shape)

"""The sum over replicas of sparse slices, sent as slices or as a table, whichever is less.

    replica 0   rows 3 7 ──┐ gathered      rows 3 7 2 7 7   while all slices together are few
    replica 1   rows 2 7 7 ┴──────▶
    replica 0   table ──┐ added up         rows 2 3 7       when they are more than twice the table: a ring sends
    replica 1   table ──┴─────────▶                         what is gathered once, and what is added up twice

What comes back are slices in both cases: rows that no replica has touched are left out, so an optimizer that leaves
such rows alone does so on many slices as on few. How many there are depends on the batch, and each replica has its own:
they tell each other first, so that all choose alike.

Where there is a GPU, what was gathered is added up row by row on the host, for all replicas in one order. A GPU adds
slices of one row in the order in which they happen to come: an optimizer that did it there would round otherwise on
each replica, and their weights would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.collectives import wire_types
from smp_tf.collectives.interface import collectives
from smp_tf.config.keys import ONE_BIT
from smp_tf.job import runtime
from smp_tf.pipeline.run.host import HOST, has_device
from smp_tf.replicas import sums
from smp_tf.replicas.two_byte_floats import COMPRESSED

#: Bytes of an element of what is compressed, as all but one bit an element are.
_COMPRESSED_SIZE = 2
#: Says of a row whether it was touched.
_TOUCHED = tf.int32


def sum_of_slices(slices: tf.IndexedSlices, name: str, handles: Sequence[Any] = ()) -> tf.IndexedSlices:
    """Returns the slices that stand for the sum over the replicas of the tensors that the slices of each stand for.

    Args:
        slices: of this replica; any number of them.
        name: unique name of the operation, equal on the ranks of the group.
        handles: resource tensors of variables, some of them within a function: the op comes after their earlier uses,
            and is done before later ones.

    Returns:
        The slices of all replicas, in their order (with a GPU a row only once), or the rows of their sum, in order;
        the slices themselves where there is one replica.
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
    """Returns whether less is sent where the table is added up, given how many slices all replicas have together."""
    dtype = slices.values.dtype
    width = tf.cast(tf.reduce_prod(tf.shape(slices.values)[1:]), tf.int64)
    slice_bytes = width * dtype.size + slices.indices.dtype.size
    # And a number that says whether the row was touched.
    row_bytes = width * _size_in_sum(_summed_as(dtype)) + _TOUCHED.size
    return 2 * tf.cast(slices.dense_shape[0], tf.int64) * row_bytes < total * slice_bytes


def _summed_as(dtype: tf.DType) -> tf.DType:
    """Returns the rows of many slices are added up in no less than four bytes."""
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
    # The largest of no elements is the least number there is. Apart from the table, whose values have a scale of their
    # own where they are compressed.
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

"""Joins sparse slices (`tf.IndexedSlices`) of several microbatches into one sparse value.

microbatch 0   rows 1, 3 of 4   ──┬─ concat ──▶  tf.IndexedSlices: rows 1, 3, 4 of 8
microbatch 1   row  0    of 4   ──┤
                                  └─ stack  ──▶  tf.SparseTensor [2, 4, ...], since slices know no axis before
                                                 that of their rows
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from smp_tf.errors import StepError


def joined(parts: Sequence[tf.IndexedSlices], name: str) -> tf.IndexedSlices:
    """Returns the slices of the tensor that holds the parts one after the other along axis 0.

    Args:
        parts: slices of tensors with equal shapes except for the first axis.
        name: what they are, for messages.

    Returns:
        The slices, those of each part after those of the parts before.
    """
    rows = [_shape(part, name)[0] for part in parts]
    before = [tf.add_n(rows[:number]) if number else tf.zeros_like(rows[0]) for number in range(len(parts))]
    indices = [part.indices + tf.cast(start, part.indices.dtype) for part, start in zip(parts, before, strict=True)]
    shape = tf.concat([[tf.add_n(rows)], _shape(parts[0], name)[1:]], axis=0)
    return tf.IndexedSlices(tf.concat([part.values for part in parts], 0), tf.concat(indices, 0), shape)


def stacked(parts: Sequence[tf.IndexedSlices], name: str) -> tf.SparseTensor:
    """Returns the tensor that holds the parts along a new axis 0.

    Args:
        parts: slices of tensors of one shape.
        name: what they are, for messages.

    Returns:
        A sparse tensor in canonical order. Slices of the same row of a part are summed.
    """
    places, values = [], []
    for number, part in enumerate(parts):
        rows, which = tf.unique(part.indices)
        summed = tf.math.unsorted_segment_sum(part.values, which, tf.size(rows))
        inside = tf.where(tf.ones_like(summed, tf.bool))
        row = tf.gather(tf.cast(rows, tf.int64), inside[:, 0])
        places.append(
            tf.concat([tf.fill([tf.size(row), 1], tf.constant(number, tf.int64)), row[:, None], inside[:, 1:]], 1)
        )
        values.append(tf.reshape(summed, [-1]))
    shape = tf.concat([[tf.constant(len(parts), tf.int64)], tf.cast(_shape(parts[0], name), tf.int64)], axis=0)
    return tf.sparse.reorder(tf.SparseTensor(tf.concat(places, 0), tf.concat(values, 0), shape))


def _shape(part: tf.IndexedSlices, name: str) -> tf.Tensor:
    if part.dense_shape is None:
        raise StepError(
            f"{name} is sparse slices that do not say of which shape (their dense_shape is None), so they cannot be "
            f"joined. Use .outputs, .reduce_mean() or .reduce_sum()."
        )
    return tf.convert_to_tensor(part.dense_shape)

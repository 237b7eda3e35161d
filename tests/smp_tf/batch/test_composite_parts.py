"""Parts of ragged and sparse tensors are known by number, among tensors and among their types."""

from __future__ import annotations

import tensorflow as tf

from smp_tf.batch.composite_parts import composite_parts


def test_parts_of_ragged_tensors_are_known_by_number() -> None:
    values = tf.zeros([2]), tf.ragged.constant([[1, 2], [3]]), None, tf.zeros([2, 3])
    assert composite_parts(values) == {1, 2}
    assert composite_parts(tf.type_spec_from_value(value) for value in values if value is not None) == {1, 2}

"""Rows of all replicas are joined in the replicas' order, whatever their axis, their type and their number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.whole_batch import joined_tail
from smp_tf.whole_batch.joined_tail import join_rows


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the messages. The other replica has the same rows, with 10 added."""
    names: list[str] = []
    here = SimpleNamespace(topology=SimpleNamespace(replicas=2), process_sets=SimpleNamespace(dp="replicas"))
    monkeypatch.setattr(joined_tail, "runtime", SimpleNamespace(current=lambda: here))

    def all_gather(tensor: tf.Tensor, group: Any, name: str, *, handles: Any) -> tf.Tensor:
        assert (group, handles) == ("replicas", ())
        names.append(name)
        return tf.concat([tensor, tensor + tf.cast(10, tensor.dtype)], 0)

    monkeypatch.setattr(joined_tail, "collectives", lambda: SimpleNamespace(all_gather=all_gather))
    return names


def test_tensors_of_a_type_travel_together(messages: list[str]) -> None:
    rows = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    # Two for each sample.
    several = tf.constant([1.0, 2.0, 3.0, 4.0])
    # The samples are along the second axis.
    columns = tf.reshape(tf.range(12), [2, 2, 3])
    found = join_rows([(rows, 0), (columns, 1), (several, 0)], tf.constant(2, tf.int64), "joined")
    np.testing.assert_array_equal(found[0], [[1, 2], [3, 4], [11, 12], [13, 14]])
    np.testing.assert_array_equal(found[1], np.concatenate([columns, columns + 10], 1))
    np.testing.assert_array_equal(found[2], [1, 2, 3, 4, 11, 12, 13, 14])
    assert messages == ["joined_float32", "joined_int32"]


def test_in_a_function_the_number_of_samples_may_be_open(messages: list[str]) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def joined(rows: tf.Tensor) -> tf.Tensor:
        return join_rows([(rows, 0)], tf.shape(rows)[0], "joined")[0]

    assert joined(tf.ones([5, 3])).shape == (10, 3)
    assert joined(tf.ones([2, 3])).shape == (4, 3)

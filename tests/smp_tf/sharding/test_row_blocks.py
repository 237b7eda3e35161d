"""Gradients of some rows of a weight, and what an optimizer is handed in the weight's place."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf.errors import StepError
from smp_tf.partition.spread import EVERYWHERE, SplitOver
from smp_tf.replicas.gradient_marks import mark, mark_of
from smp_tf.sharding import row_blocks

OF_ROWS = SplitOver("D", 0, (0, 1, 3))


def test_of_a_gradient_its_rows_are_taken_and_what_is_known_of_it_stays() -> None:
    whole = mark(tf.constant([[1.0], [2.0], [3.0]]), spread=EVERYWHERE)
    rows = row_blocks.rows_of_gradient(whole, (1, 3))
    assert rows.numpy().tolist() == [[2.0], [3.0]]
    assert mark_of(rows).is_average
    slices = tf.IndexedSlices(tf.constant([[5.0], [6.0], [7.0]]), tf.constant([2, 0, 2]), tf.constant([3, 1]))
    found = row_blocks.rows_of_gradient(slices, (1, 3))
    assert (found.values.numpy().tolist(), found.indices.numpy().tolist()) == ([[5.0], [7.0]], [1, 1])


def test_a_gradient_that_is_of_these_rows_alone_is_left_as_it_is() -> None:
    gradient = mark(tf.constant([[2.0], [3.0]]), spread=OF_ROWS)
    assert row_blocks.rows_of_gradient(gradient, (1, 3)) is gradient


@pytest.mark.parametrize("now", [EVERYWHERE, SplitOver("D", 0, (0, 2, 4))])
def test_rows_that_an_optimizer_does_not_update_any_more_are_an_error(
    monkeypatch: pytest.MonkeyPatch, now: Any
) -> None:
    """It has made slots of the whole since the step was built; what comes to it would be added to other rows."""
    monkeypatch.setattr(row_blocks, "slots_of", lambda variable, optimizer: now)
    gradient = mark(tf.constant([[2.0], [3.0]]), spread=OF_ROWS)
    with pytest.raises(StepError, match=r"some rows of the gradient of 'table:0', and SGD does not update these"):
        row_blocks.pairs_in_place(tf_keras.optimizers.SGD(), [(gradient, tf.Variable(tf.ones([3, 1]), name="table"))])

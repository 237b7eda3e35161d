"""What is known of a gradient, and of what is made of it."""

from __future__ import annotations

import gc
import weakref

import tensorflow as tf

from smp_tf.partition.spread import EVERYWHERE, Partial, SplitOver, Whole
from smp_tf.replicas.gradient_marks import Computed, Mark, comes_from_a_step, computed, mark, mark_of


def test_one_mark_holds_all_that_is_known() -> None:
    gradient = tf.constant([1.0])
    assert mark_of(gradient) == Mark(False, None, None)
    assert mark(gradient, spread=Whole("D", 1, 2)) is gradient
    mark(gradient, is_of_step=True)
    assert mark_of(gradient) == Mark(True, Whole("D", 1, 2))
    # Another tensor of the same value has none.
    assert mark_of(tf.constant([1.0])) == mark_of(None) == mark_of(3.0) == Mark()


def test_what_is_an_average() -> None:
    spreads = (None, Partial("D"), EVERYWHERE, Whole("D", 1, 2), SplitOver("D", 0, (0, 1, 3)))
    assert [Mark(spread=spread).is_average for spread in spreads] == [False, False, True, True, True]
    assert [Mark(spread=spread).is_unaveraged for spread in spreads] == [False, True, False, False, False]


def test_a_mark_goes_with_its_graph() -> None:
    """A table of marks kept graphs alive: a mark knows an op of the graph."""

    def step(x: tf.Tensor) -> tf.Tensor:
        gradient = x * 2.0
        return mark(gradient, is_of_step=True, computed=Computed(gradient.op, 3))

    graph = weakref.ref(tf.function(step).get_concrete_function(tf.TensorSpec([1])).graph)
    gc.collect()
    assert graph() is None


def test_sparse_slices_have_one_of_their_own_and_their_values_are_a_step_s() -> None:
    slices = mark(tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0])), is_of_step=True, spread=EVERYWHERE)
    assert mark_of(slices) == Mark(True, EVERYWHERE)
    assert comes_from_a_step(slices)
    # Other rows of the same values are no average.
    others = tf.IndexedSlices(slices.values, tf.constant([1]))
    assert mark_of(others) == Mark()
    assert comes_from_a_step(others)


def test_where_it_was_made_is_known_in_that_graph_alone() -> None:
    found = []

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        gradient = x * 2.0
        found.append(mark(gradient, computed=Computed(gradient.op, 3)))
        found.append(computed(gradient))
        return gradient

    step(tf.ones([1]))
    gradient, inside = found
    assert inside == Computed(gradient.op, 3)
    assert computed(gradient) is None

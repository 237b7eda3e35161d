"""Averages of gradients that no step has averaged: one Horovod operation for all, under one name."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smp_tf.gradients.average import average_gradients
from smp_tf.partition.spread import EVERYWHERE
from smp_tf.replicas import gradient_marks


def test_averages_leave_out_what_is_none_or_averaged_already(reduced: list[dict[str, Any]]) -> None:
    done = gradient_marks.mark(tf.constant([7.0]), spread=EVERYWHERE)
    first, none, same, other = average_gradients([tf.constant([1.0, 2.0]), None, done, tf.constant(4.0)])
    assert (first.numpy().tolist(), none, same is done, float(other)) == ([1.0, 2.0], None, True, 4.0)
    assert [(asked["types"], asked["name"]) for asked in reduced] == [([tf.float32] * 2, "smp_average_float32")]
    assert all(gradient_marks.mark_of(one).is_average for one in (first, same, other))
    again = average_gradients([first, same])
    assert (again[0] is first, again[1] is same, len(reduced)) == (True, True, 1)


def test_the_average_of_sparse_slices_is_sparse(reduced: list[dict[str, Any]]) -> None:
    slices = tf.IndexedSlices(tf.constant([[3.0]]), tf.constant([1]), tf.constant([9, 1]))
    (average,) = average_gradients([slices])
    assert isinstance(average, tf.IndexedSlices)
    assert average.values.numpy().tolist() == [[1.0], [1.0], [1.0]]
    assert tf.convert_to_tensor(average).numpy().ravel().tolist() == [0.0, 3.0] + [0.0] * 7
    assert [asked["gathered"] for asked in reduced[1:]] == [tf.float32, tf.int32]


def test_within_a_graph_one_average_comes_behind_the_other(reduced: list[dict[str, Any]]) -> None:
    """Since all of them have one name, of which Horovod takes one at a time."""

    @tf.function
    def twice(x: tf.Tensor) -> Any:
        first = average_gradients([x])
        return first + average_gradients([2.0 * x])

    assert [float(t) for t in twice(tf.constant(1.0))] == [1.0, 2.0]
    assert {asked["name"] for asked in reduced} == {"smp_average_float32"}
    graph = twice.get_concrete_function(tf.TensorSpec([])).graph
    # What is given and what came back, of the first and of the second.
    passes = [op for op in graph.get_operations() if op.type == "SmpAtRunTime"]
    assert len(passes) == 4
    assert passes[1] in passes[2].control_inputs


def test_names_do_not_depend_on_how_many_functions_were_traced(reduced: list[dict[str, Any]]) -> None:
    """A replica that traced a function once more than another waited for it under another name, for good."""

    def average(gradient: tf.Tensor) -> Any:
        return average_gradients([gradient, None]) + average_gradients([gradient])

    for size in (3, 4):
        tf.function(average).get_concrete_function(tf.TensorSpec([size]))
        # Nothing to average takes no name.
        average_gradients([None])
    assert [asked["name"] for asked in reduced] == ["smp_average_float32"] * 4

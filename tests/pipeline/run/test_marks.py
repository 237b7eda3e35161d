"""Where marks of updates stand in a graph: an end behind its begin, whatever threads do."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smp_tf.pipeline.run.marks import applying, begin_reduce, end_reduce


def marks(graph: Any) -> list[Any]:
    return [op for op in graph.get_operations() if op.type == "SmpMark"]


def test_an_apply_is_marked_from_its_gradients_to_the_last_change() -> None:
    first, second = tf.Variable([1.0]), tf.Variable([2.0])

    @tf.function(autograph=False)
    def apply(gradient: tf.Tensor) -> None:
        gradients = [gradient * 2.0, gradient * 3.0]
        with applying(1, gradients, [first, second]):
            first.assign_sub(gradients[0])
            second.assign_sub(gradients[1])
            first.assign_add([1.0])

    graph = apply.get_concrete_function(tf.TensorSpec([1])).graph
    begin, end = marks(graph)
    assert (begin.get_attr("task"), begin.get_attr("ends")) == (b"1APPLY", False)
    assert sorted(op.type for op in begin.control_inputs) == ["Mul", "Mul"]
    assert end.get_attr("ends")
    before = {op.type for op in end.control_inputs}
    assert before == {"SmpMark", "AssignSubVariableOp", "AssignAddVariableOp"}
    assert {begin, end} <= set(graph.control_outputs)
    apply(tf.ones([1]))
    assert (first.numpy(), second.numpy()) == ([0.0], [-1.0])


def test_a_reduce_is_marked_from_what_goes_in_to_what_comes_out() -> None:
    @tf.function(autograph=False)
    def reduce(x: tf.Tensor) -> tf.Tensor:
        step = tf.constant(0, tf.int64)
        begun = begin_reduce(step, 7, 2, [x + 1.0], 3)
        y = x - 1.0
        end_reduce(begun, step, 7, 2, [y], 3)
        return y

    graph = reduce.get_concrete_function(tf.TensorSpec([1])).graph
    begin, end = marks(graph)
    assert begin.get_attr("task") == end.get_attr("task") == b"2REDUCE3"
    assert [op.type for op in begin.control_inputs] == ["AddV2"]
    assert {op.type for op in end.control_inputs} == {"SmpMark", "Sub"}
    assert end in graph.control_outputs

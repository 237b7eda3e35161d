"""Costs of ops that call functions: bodies, loops, branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from smp_tf.partition.graph.op_graph import Call, Node, OpGraph, Tensor, TensorType
from smp_tf.partition.op_cost.function_cost import ASSUMED_TRIPS, node_costs
from smp_tf.partition.op_cost.node_cost import FREE, NodeCost

tf = pytest.importorskip("tensorflow")

PRODUCT = 2 * 4 * 8 * 8


def total(function: Callable[..., Any], *specs: Any) -> NodeCost:
    """Cost of all ops of a traced function together."""
    graph = tf.function(function).get_concrete_function(*specs).graph
    operations = graph.get_operations()
    numbers = {op.name: n for n, op in enumerate(operations)}

    def kind(tensor: Any) -> TensorType:
        rank = tensor.shape.rank
        return TensorType(tensor.dtype.name, None if rank is None else tuple(tensor.shape.as_list()))

    nodes = tuple(
        Node(
            op.name,
            op.type,
            tuple(Tensor(numbers[t.op.name], t.value_index) for t in op.inputs),
            (),
            tuple(kind(t) for t in op.outputs),
            op.node_def.SerializeToString(),
        )
        for op in operations
    )
    library = graph.as_graph_def().library.SerializeToString()
    costs = node_costs(OpGraph(nodes, (Call(0, "", "", None),), (), (), (), library))
    summed = FREE
    for cost in costs:
        summed += cost
    return summed


X, W = tf.TensorSpec([4, 8]), tf.TensorSpec([8, 8])


def test_a_call_costs_its_body() -> None:
    inner = tf.function(lambda x, w: tf.matmul(tf.matmul(x, w), w))
    assert total(lambda x, w: inner(x, w), X, W).flops == 2 * PRODUCT


def test_a_loop_costs_its_body_as_often_as_it_runs() -> None:
    def loop(x: Any, w: Any) -> Any:
        return tf.while_loop(lambda i, x: i < 7, lambda i, x: (i + 1, tf.matmul(x, w)), [0, x])

    cost = total(loop, X, W)
    # Each round multiplies, and counts (i and the loop's own counter).
    assert cost.flops == pytest.approx(7 * PRODUCT, rel=0.01)
    assert cost.defaulted == frozenset()


def test_a_loop_of_unknown_length_is_assumed_and_said() -> None:
    def loop(x: Any, w: Any, n: Any) -> Any:
        return tf.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, tf.matmul(x, w)), [0, x])

    cost = total(loop, X, W, tf.TensorSpec([], tf.int32))
    assert cost.flops == pytest.approx(ASSUMED_TRIPS * PRODUCT, rel=0.01)
    assert any(f"taken to run {ASSUMED_TRIPS} times" in said for said in cost.defaulted)


def test_of_two_branches_the_dearer_counts() -> None:
    def either(x: Any, w: Any, flag: Any) -> Any:
        return tf.cond(flag, lambda: tf.matmul(tf.matmul(x, w), w), lambda: x)

    assert total(either, X, W, tf.TensorSpec([], tf.bool)).flops == 2 * PRODUCT


def test_a_length_read_from_a_static_shape_is_known() -> None:
    def loop(x: Any, w: Any) -> Any:
        inner = tf.function(
            lambda x, w: tf.while_loop(lambda i, x: i < tf.shape(w)[0], lambda i, x: (i + 1, tf.matmul(x, w)), [0, x])
        )
        return inner(x, w)

    assert total(loop, X, W).flops == pytest.approx(8 * PRODUCT, rel=0.01)

"""Ops that compute what an earlier op has computed, found in traced functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from smp_tf.partition.graph.op_graph import SOURCES, OpGraph, Tensor
from smp_tf.partition.op_cost.repeated_ops import repeated_ops, without_repeated_ops
from tests.partition.traced_step import step_graph


def repeated(graph: OpGraph) -> list[str]:
    numbers = tuple(number for number, node in enumerate(graph.nodes) if node.op not in SOURCES)
    return [graph.nodes[number].op for number in repeated_ops(graph, numbers) if graph.nodes[number].op != "Const"]


def branches(x: tf.Tensor) -> tf.Tensor:
    """As cells of NASNet begin: each branch has its own activation and padding."""
    first, second = (tf.pad(tf.nn.relu(tf.identity(x)), [[1, 1]]) for _ in range(2))
    return first * second


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (branches, ["Relu", "Pad"]),
        (lambda x: tf.nn.relu(x) + tf.nn.relu(-x), []),
        # Other attributes, other values, random numbers.
        (lambda x: tf.nn.leaky_relu(x, 0.1) + tf.nn.leaky_relu(x, 0.2), []),
        (lambda x: tf.tile(x, [2]) + tf.concat([tf.pad(x, [[0, 4]]), tf.pad(x, [[4, 0]])], 0)[:8], []),
        (lambda x: tf.random.uniform([4]) + tf.random.uniform([4]) + x, []),
    ],
)
def test_ops_are_alike_where_they_are_given_the_same(
    function: Callable[[tf.Tensor], tf.Tensor], found: list[str]
) -> None:
    assert repeated(step_graph(function, tf.TensorSpec([4]))) == found


def test_what_reads_a_repeated_op_reads_the_first() -> None:
    graph = step_graph(branches, tf.TensorSpec([4]))
    numbers = tuple(number for number, node in enumerate(graph.nodes) if node.op not in SOURCES)
    [(first, second)] = [(f, n) for n, f in repeated_ops(graph, numbers).items() if graph.nodes[n].op == "Pad"]
    [product] = [number for number, node in enumerate(graph.nodes) if node.op == "Mul"]
    assert graph.nodes[product].inputs == (Tensor(first, 0), Tensor(second, 0))
    changed = without_repeated_ops(graph, {second: first})
    assert changed.nodes[product].inputs == (Tensor(first, 0), Tensor(first, 0))


def test_an_op_that_waits_for_others_is_like_no_other() -> None:
    graph = step_graph(branches, tf.TensorSpec([4]))
    relus = [number for number, node in enumerate(graph.nodes) if node.op == "Relu"]
    numbers = tuple(number for number, node in enumerate(graph.nodes) if node.op not in SOURCES)
    assert relus[1] in repeated_ops(graph, numbers)
    assert relus[1] not in repeated_ops(graph, numbers, (relus[1],))

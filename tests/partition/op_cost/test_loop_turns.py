"""How many turns of a loop may be under way, and that its numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf.partition.graph.fingerprint import fingerprint
from smp_tf.partition.graph.node_def import attributes, bodies, functions
from smp_tf.partition.graph.op_graph import ARGUMENT, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import LOOP_OPS
from smp_tf.partition.op_cost.loop_turns import FEW, turns_at_once, with_few_turns
from smp_tf.partition.split.segment_graph import remote_value_name, segment_graph, tensor_name
from tests.partition.op_graph_builder import GraphBuilder
from tests.partition.split.test_segment_graph import all_of, outputs, run
from tests.partition.traced_step import FLOATS, step_graph

SEQUENCES = tf.TensorSpec([2, 5, 8], tf.float32)
X = np.linspace(-1.0, 1.0, 80, dtype=np.float32).reshape(2, 5, 8)


def turns(graph: OpGraph) -> list[int]:
    """The turns under way of all loops of a graph, and of those in the functions that it calls."""
    found = [turns_at_once(node) for node in graph.nodes if node.op in LOOP_OPS]
    written = segment_graph(graph, all_of(graph), owned=[v.index for v in graph.variables])
    within = [node for function in written.library.function for node in function.node_def if node.op in LOOP_OPS]
    return sorted(found + [node.attr["parallel_iterations"].i for node in within])


def gradient_step(function: Callable[[tf.Tensor], tf.Tensor], weights: list[tf.Variable]) -> Callable[..., Any]:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) ** 2)
        return loss, tape.gradient(loss, weights)

    return step


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
def test_turns_of_a_recurrent_layer_are_few_forward_and_backward(kind: str) -> None:
    model = tf_keras.Sequential([layers.Input((5, 8)), getattr(layers, kind)(4)])
    step = gradient_step(model, model.trainable_variables)
    assert turns(step_graph(step, SEQUENCES, models=[model])) == [FEW, FEW]


def test_what_is_computed_stays() -> None:
    model = tf_keras.Sequential([layers.Input((5, 8)), layers.LSTM(4, return_sequences=True), layers.LSTM(3)])
    step = gradient_step(model, model.trainable_variables)
    graph = step_graph(step, SEQUENCES, models=[model])
    x = next(n for n, node in enumerate(graph.nodes) if node.op == ARGUMENT)
    given = {tensor_name(graph, Tensor(x, 0)): tf.constant(X)}
    values = {v.name.partition(":")[0]: v for v in model.variables}
    given |= {remote_value_name(graph, v.index): values[v.name].value() for v in graph.variables}
    found = run(segment_graph(graph, all_of(graph), owned=[]), given, outputs(graph))
    loss, gradients = tf.function(step)(tf.constant(X))
    for ours, theirs in zip(found, [loss, *gradients], strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-7)


def test_turns_that_do_not_wait_for_each_other_stay_many() -> None:
    w = tf.Variable(tf.ones([8, 8]))
    step = gradient_step(lambda x: tf.map_fn(lambda row: tf.linalg.matvec(w, row), x), [w])
    assert turns(step_graph(step, FLOATS)) == [10, 10]


def test_turns_that_wait_for_no_product_stay_many() -> None:
    step = gradient_step(lambda x: tf.while_loop(lambda i, h: i < 5, lambda i, h: (i + 1, tf.tanh(h)), [0, x])[1], [])
    assert turns(step_graph(step, FLOATS)) == [10]


def test_a_chain_of_sums_over_products_that_do_not_wait_stays() -> None:
    """h needs a product of k, and k none of h: as many turns may be under way as there are."""
    w = tf.Variable(tf.ones([8, 8]))

    def body(i: tf.Tensor, k: tf.Tensor, h: tf.Tensor) -> Any:
        return i + 1, k + 1.0, h + k @ w

    step = gradient_step(lambda x: tf.while_loop(lambda i, *_: i < 5, body, [0, x, x])[2], [])
    assert turns(step_graph(step, FLOATS)) == [10]


@pytest.mark.parametrize(("asked", "few"), [(1, 1), (2, 2), (3, FEW), (32, FEW)])
def test_who_asks_for_fewer_has_fewer(asked: int, few: int) -> None:
    w = tf.Variable(tf.ones([8, 8]))

    def last(x: tf.Tensor) -> tf.Tensor:
        turn = (lambda i, h: i < 5, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x])
        return tf.while_loop(*turn, parallel_iterations=asked)[1]

    assert turns(step_graph(gradient_step(last, [w]), FLOATS)) == [few, few]


def test_a_loop_of_loops_with_products_is_one_with_products() -> None:
    w = tf.Variable(tf.ones([8, 8]))

    def inner(h: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, h])[1]

    def last(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, inner(h)), [0, x])[1]

    graph = step_graph(gradient_step(last, []), FLOATS)
    assert set(turns(graph)) == {FEW}
    # TensorFlow knows the body with ten turns in it by its old name.
    called = [bodies(attributes(node))[0] for node in graph.nodes if node.op in LOOP_OPS]
    assert any(name.endswith("_few_turns") for name in called)
    assert set(called) <= set(functions(graph.library))


def test_functions_for_other_devices_are_not_put_in_their_place() -> None:
    """TensorFlow put the functions back whose loops have many turns under way, since both say that they do the same."""
    model = tf_keras.Sequential([layers.Input((5, 8)), layers.LSTM(4)])
    graph = step_graph(gradient_step(model, model.trainable_variables), SEQUENCES, models=[model])
    written = segment_graph(graph, all_of(graph), owned=[v.index for v in graph.variables])
    alike = {
        f.signature.name: f.attr["api_implements"].s for f in written.library.function if "api_implements" in f.attr
    }
    assert alike
    for name, text in alike.items():
        assert name.endswith("_few_turns")
        assert text.endswith(b"_few_turns")


def test_a_function_that_a_dataset_calls_changes_by_name_too() -> None:
    """The dataset named a function that the library did not have, and its step was another one in every trace."""
    w = tf.Variable(tf.ones([8, 8]))

    def last(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x])[1]

    def step(x: tf.Tensor) -> tf.Tensor:
        rows = tf.data.Dataset.from_tensor_slices(x).map(lambda row: last(row[tf.newaxis]))
        return rows.reduce(tf.zeros([1, 8]), lambda a, b: a + b)

    first, second = step_graph(step, FLOATS), step_graph(step, FLOATS)
    [mapped] = [node for node in first.nodes if node.op == "MapDataset"]
    assert attributes(mapped)["f"].func.name in functions(first.library)
    assert fingerprint(first) == fingerprint(second)
    assert set(turns(first)) == {FEW}


def test_a_graph_without_loops_is_the_graph_that_it_was() -> None:
    b = GraphBuilder()
    graph = b.graph(b.add("Neg", b.argument()))
    assert with_few_turns(graph) is graph

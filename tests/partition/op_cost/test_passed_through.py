"""Results of functions that are their arguments."""

from __future__ import annotations

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.op_cost.passed_through import passed_through
from smp_tf.partition.units.cost import estimate
from smp_tf.partition.units.units import build_units
from tests.partition.traced_step import step_graph

UNITS, FEATURES, LENGTH, BATCH = 32, 8, 5, 4


def recurrent(make: type) -> OpGraph:
    model = tf_keras.Sequential([tf_keras.Input((LENGTH, FEATURES)), make(UNITS), layers.Dense(1)])

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        return tape.gradient(loss, model.trainable_variables)

    return step_graph(step, tf.TensorSpec((BATCH, LENGTH, FEATURES)), models=[model])


@pytest.mark.parametrize("make", [layers.LSTM, layers.GRU])
def test_a_recurrent_layer_gives_its_kernels_to_its_gradient(make: type) -> None:
    """Bug: each microbatch's stash was forecast to hold them once more, an eighth of an LSTM's memory."""
    graph = recurrent(make)
    [(number, node)] = [
        (n, node) for n, node in enumerate(graph.nodes) if node.op == "PartitionedCall" and not node.backward
    ]
    passed = passed_through(graph)[number]
    assert passed
    for output, source in passed.items():
        assert node.outputs[output] == graph.type_of(node.inputs[source])
    gates = 4 if make is layers.LSTM else 3
    shapes = [node.outputs[output].shape for output in passed]
    assert {(FEATURES, gates * UNITS), (UNITS, gates * UNITS)} <= set(shapes)
    kernels = (FEATURES + UNITS) * gates * UNITS * 4
    read = {t for n in graph.nodes if n.backward for t in n.inputs if t.node == number}
    whole = sum(graph.type_of(tensor).nbytes() for tensor in read)
    kept = sum(stash.nbytes for stash in estimate(graph, build_units(graph)).stashes if stash.producer == 0)
    assert kept <= whole - kernels


def traced(function: tf.types.experimental.PolymorphicFunction) -> dict[int, int]:
    graph = step_graph(lambda x, y: function(x, y)[:2], *(tf.TensorSpec((2, 3)),) * 2)
    [found] = passed_through(graph).values()
    return found


def test_calls_within_calls_are_looked_into() -> None:
    @tf.function(experimental_attributes={"_noinline": True})
    def inner(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.identity(y), x + y

    @tf.function(experimental_attributes={"_noinline": True})
    def outer(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        first, second = inner(x, y)
        return second, tf.reshape(first, [3, 2]), tf.identity(x)

    assert traced(outer) == {1: 1, 2: 0}


def test_what_a_loop_changes_or_swaps_is_not_passed_on() -> None:
    @tf.function(experimental_attributes={"_noinline": True})
    def looped(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        def turn(i: tf.Tensor, one: tf.Tensor, other: tf.Tensor, kept: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return i + 1, other, one, kept

        _, one, other, kept = tf.while_loop(lambda i, *rest: i < 3, turn, (0, x, y, y))
        return one, other, kept

    assert traced(looped) == {2: 1}
    assert passed_through(step_graph(tf.identity, tf.TensorSpec((2,)))) == {}


def test_what_xla_compiles_copies_what_it_passes_through() -> None:
    """Bug: the kernels that a grouped convolution gives to its gradient were taken to lie in the weights' memory."""

    def swapped(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return y, x

    assert traced(tf.function(swapped, experimental_attributes={"_noinline": True})) == {0: 1, 1: 0}
    assert traced(tf.function(swapped, jit_compile=True)) == {}

"""The lists that loops keep for their gradients are counted, each memory once."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf.partition.graph.op_graph import OpGraph, TensorType
from smp_tf.partition.op_cost.function_cost import ASSUMED_TRIPS
from tests.partition.traced_step import step_graph

SAMPLES, STEPS, WIDTH, UNITS = 4, 10, 3, 8
#: Bytes of one float of each sample and step.
ONE = SAMPLES * STEPS * 4


def gradients(layer: Any) -> OpGraph:
    model = tf_keras.Sequential([layer])
    model.build((None, STEPS, WIDTH))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables)

    return step_graph(step, tf.TensorSpec([SAMPLES, STEPS, WIDTH]), models=[model])


def kept(graph: OpGraph) -> int:
    """Bytes of the lists of floats that forward gives to backward."""
    kinds = [
        graph.type_of(tensor)
        for tensor, readers in graph.consumers.items()
        if not graph.nodes[tensor.node].backward and any(graph.nodes[reader].backward for reader in readers)
    ]
    return sum(kind.nbytes(SAMPLES) for kind in kinds if kind.entry and kind.entry.dtype == "float32")


@pytest.mark.parametrize(
    ("layer", "lists"),
    [
        # Three gates, two activations, the state and the output; of what went in, a list of its rows.
        (tf_keras.layers.LSTM(UNITS, return_sequences=True), 7 * UNITS + WIDTH),
        # The output of the step before is in the list of outputs, and the kernels are those of the layer.
        (tf_keras.layers.SimpleRNN(UNITS, return_sequences=True), UNITS + WIDTH),
    ],
    ids=["lstm", "simple_rnn"],
)
def test_a_recurrent_layer_keeps_what_its_steps_made_and_no_list_twice(layer: Any, lists: int) -> None:
    assert kept(gradients(layer)) == lists * ONE


def test_a_loop_of_unknown_length_is_counted_as_its_work_is() -> None:
    def step(x: tf.Tensor, times: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(lambda i, y: i < times, lambda i, y: (i + 1, tf.tanh(y)), (0, x))
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    graph = step_graph(step, tf.TensorSpec([4, 8]), tf.TensorSpec([], tf.int32))
    assert kept(graph) == ASSUMED_TRIPS * 4 * 8 * 4


def test_a_list_is_as_large_as_its_entries_and_another_variant_takes_nothing() -> None:
    assert TensorType("variant", (), TensorType("float32", (None, 8)), 10).nbytes(4) == 10 * 4 * 8 * 4
    assert TensorType("variant", ()).nbytes(4) == 0

"""Once a step has run, the graphs that its program was made from are gone, and what comes later does without them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.partition.graph.op_graph import OpGraph

X = tf.constant(np.random.default_rng(1).normal(size=(8, 6)), tf.float32)
Y = tf.constant(np.arange(8) % 3)


def graphs() -> Iterator[Any]:
    """The graphs of functions that are in memory."""
    gc.collect()
    return (found for found in gc.get_objects() if type(found) is tf.__internal__.FuncGraph)


@pytest.fixture(autouse=True)
def earlier(keras_defaults: None) -> Iterator[None]:
    """Graphs of other tests do not count."""
    known.clear()
    known.update(graphs())
    yield
    known.clear()


known: weakref.WeakSet[Any] = weakref.WeakSet()


def new_graphs() -> list[str]:
    return sorted(graph.name for graph in graphs() if graph not in known)


def net(hidden: Any = None) -> Any:
    parts = [hidden or layers.Dense(5, activation="relu"), layers.Dropout(0.5), layers.Dense(3)]
    return smp.DistributedModel(tf_keras.Sequential(parts))


def own_loop(model: Any, optimizer: Any) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    @smp.step
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables), loss

    @tf.function
    def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        gradients, loss = step(x, y)
        optimizer.apply_gradients(
            [(gradient.accumulate(), v) for gradient, v in zip(gradients, model.trainable_variables, strict=True)]
        )
        return loss.reduce_mean()

    return train


def test_a_loop_keeps_its_own_function_alone(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net()
    train = own_loop(model, tf_keras.optimizers.SGD(0.1))
    losses = [float(train(X, Y)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert new_graphs() == ["train"]
    # Batches of another size, and the same step in another function.
    assert float(train(X[:6], Y[:6])) > 0
    again = own_loop(model, tf_keras.optimizers.SGD(0.1))
    assert float(again(X, Y)) > 0
    assert new_graphs() == ["train", "train", "train"]


def test_what_is_left_of_the_op_graph_is_what_writing_a_program_needs(init: Callable[..., None]) -> None:
    def op_graphs() -> list[OpGraph]:
        gc.collect()
        return [found for found in gc.get_objects() if type(found) is OpGraph]

    # Other tests of this process may hold some.
    before = op_graphs()
    known = set(map(id, before))
    init(microbatches=2)
    train = own_loop(net(), tf_keras.optimizers.SGD(0.1))
    train(X, Y)
    kept = [graph for graph in op_graphs() if id(graph) not in known]
    assert len(kept) == 1
    assert {node.definition for node in kept[0].nodes} == {b""}


def test_fit_evaluate_and_predict_keep_one_function_a_program(init: Callable[..., None], tmp_path: Path) -> None:
    init(microbatches=4)
    model = net()
    model.compile("sgd", tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    def kept() -> list[str]:
        return [name.rpartition("_")[0] for name in new_graphs()]

    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert kept() == ["train_step"]
    # Batches of another size, and a part of a batch at the end.
    model.fit(X, Y, batch_size=6, verbose=0)
    loss, accuracy = model.evaluate(X, Y, batch_size=8, verbose=0)
    assert model.predict(X, batch_size=8, verbose=0).shape == (8, 3)
    assert np.isfinite([loss, accuracy]).all()
    programs = len(kept())
    model.save(tmp_path / "model.keras")
    loaded = tf_keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(X), model.predict(X, batch_size=8, verbose=0), rtol=1e-5)
    model.fit(X, Y, batch_size=8, verbose=0)
    of_steps = [name for name in kept() if name.endswith("_step")]
    assert sorted(set(of_steps)) == ["predict_step", "test_step", "train_step"]
    assert len(of_steps) == programs


def test_a_loop_within_a_layer_outlives_the_trace(init: Callable[..., None]) -> None:
    """TensorFlow drops the functions of a loop with the graph that they were traced for."""

    class Powers(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * x), (0, x))[1]

    init(microbatches=4)
    model = net(Powers())
    train = own_loop(model, tf_keras.optimizers.SGD(0.1))
    losses = [float(train(X, Y)) for _ in range(2)]
    gc.collect()
    assert np.isfinite(losses).all()
    again = own_loop(model, tf_keras.optimizers.SGD(0.1))
    assert np.isfinite([float(again(X, Y)), float(train(X, Y))]).all()

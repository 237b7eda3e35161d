"""Which partition a script asks for: around a layer's construction, around its call, the innermost context first."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.keras.layer_patches import construction_patch
from smp_tf.keras.placed_layers import stage_of
from smp_tf.model.manual_placement import partition
from tests.smp_tf.layer_calls import calls_of


class Layer(layers.Layer):
    """A layer without weights."""


@pytest.fixture(autouse=True)
def _patch_removed(keras_defaults: None) -> Iterator[None]:
    yield
    construction_patch.remove()


def test_without_a_context_nothing_is_asked_for() -> None:
    assert stage_of(Layer()) is None


def test_a_call_goes_where_the_context_around_it_says() -> None:
    layer = Layer()
    with partition(1):
        assert stage_of(layer) == 1
    assert stage_of(layer) is None


def test_the_innermost_context_wins() -> None:
    layer = Layer()
    with partition(0):
        with partition(2):
            assert stage_of(layer) == 2
        assert stage_of(layer) == 0


def test_a_layer_remembers_the_context_it_was_constructed_in() -> None:
    with partition(1), partition(3):
        layer = Layer()
    assert stage_of(layer) == 3


def test_the_context_around_a_call_wins_over_that_around_the_construction() -> None:
    with partition(3):
        layer = Layer()
    with partition(1):
        assert stage_of(layer) == 1
    assert stage_of(layer) == 3


def test_every_layer_that_a_model_makes_under_a_context_is_placed() -> None:
    with partition(1):
        model = tf_keras.Sequential([layers.Input((3,)), layers.Dense(2), layers.Dense(1)])
        cell = layers.LSTM(2)
    assert [stage_of(layer) for layer in model.layers] == [1, 1]
    assert (stage_of(model), stage_of(cell)) == (1, 1)


def test_shutdown_ends_the_noting_of_constructions(init: Callable[..., None]) -> None:
    original = layers.Layer.__init__
    init()
    with partition(1):
        assert layers.Layer.__init__ is not original
    smp.shutdown()
    assert layers.Layer.__init__ is original


class Placed(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        with partition(1):
            self.built_on_1 = layers.Dense(2)
        self.free = layers.Dense(2)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        x = self.built_on_1(x)
        with partition(0):
            x = self.free(x)
            with partition(2):
                x = self.built_on_1(x)
        return self.free(x)


def test_in_a_step_each_call_is_traced_with_the_partition_asked_for(init: Callable[..., None]) -> None:
    init()
    model = Placed()
    calls = calls_of(lambda: model(tf.ones([2, 2])))
    assert [(name, stage) for name, _, stage in calls] == [
        ("placed", None),
        ("dense", 1),
        ("dense_1", 0),
        ("dense", 2),
        ("dense_1", None),
    ]


def test_ops_that_a_model_makes_itself_are_in_a_block_of_the_partition(init: Callable[..., None]) -> None:
    """They were once placed with their neighbours, whatever the script said."""
    init(microbatches=2)

    class Net(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = layers.Dense(2, name="hidden"), layers.Dense(2, name="head")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            x = self.hidden(x)
            with partition(1):
                x = tf.nn.relu(x)
                return self.head(x)

    model = Net()

    @smp.step
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(model(x))

    step(tf.ones([4, 2]))
    [program] = step._programs.values()
    graph = program.stage_program.split.graph
    placed = {n.op: (graph.calls[n.call].path, graph.calls[n.call].stage) for n in graph.nodes}
    assert placed["Relu"] == ("net/partition_1", 1)
    assert {c.path: c.stage for c in graph.calls if c.path} == {
        "net": None,
        "net/hidden": None,
        "net/partition_1": 1,
        "net/partition_1/head": 1,
    }


def test_an_error_within_ends_the_context() -> None:
    with pytest.raises(KeyError), partition(1):
        raise KeyError
    assert stage_of(Layer()) is None


def test_another_thread_is_not_in_the_context() -> None:
    layer, seen = Layer(), []
    with partition(1):
        thread = threading.Thread(target=lambda: seen.append(stage_of(layer)))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_note_does_not_keep_a_layer_alive() -> None:
    with partition(1):
        layer = Layer()
    found = weakref.ref(layer)
    assert stage_of(layer) == 1
    del layer
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("index", [True, 1.0, "1", None])
def test_a_partition_is_a_whole_number(index: Any) -> None:
    with pytest.raises(TypeError, match=f"A partition is a whole number. Received: {index!r} .*{type(index).__name__}"):
        partition(index).__enter__()


def test_a_partition_is_not_negative() -> None:
    with pytest.raises(ValueError, match=r"numbered from 0\. Received: -1"):
        partition(-1).__enter__()

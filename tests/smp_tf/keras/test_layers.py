"""Layer calls are announced within a distributed model only; metrics and adapting layers hold their values at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.keras import layers as keras_adapter
from tests.smp_tf.layer_calls import CallList, calls_of

pytestmark = pytest.mark.usefixtures("keras_defaults")


class Block(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(2, name="inner")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.inner(x) + x


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.block = Block()

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.block(self.block(x))


class TestLayerCalls:
    def test_every_call_in_a_model_is_announced_nested_and_repeated_ones_too(self, init: Callable[..., None]) -> None:
        init()
        model = Net()
        assert calls_of(lambda: model(tf.ones([2, 2]))) == [
            ("net", "Net", None),
            ("block", "Block", None),
            ("inner", "Dense", None),
            ("block", "Block", None),
            ("inner", "Dense", None),
        ]

    def test_a_call_outside_a_model_is_not_announced(self, init: Callable[..., None]) -> None:
        init()
        model, plain = Net(), layers.Dense(2)

        def body() -> None:
            plain(plain(model(tf.ones([2, 2]))))

        assert [name for name, _, _ in calls_of(body)] == ["net", "block", "inner", "block", "inner"]

    def test_the_arguments_of_announced_calls_are_noted(self, init: Callable[..., None]) -> None:
        noted: list[tuple[str, int, list[str]]] = []

        def note(layer: layers.Layer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            noted.append((layer.name, len(args), sorted(kwargs)))

        dense = layers.Dense(2, name="dense")
        with keras_adapter.tag_calls(CallList(), lambda layer: layer is dense, note=note):
            dense(tf.ones([2, 2]))
            dense(inputs=tf.ones([2, 2]))
            layers.Dense(2, name="another")(tf.ones([2, 2]))
        assert noted == [("dense", 1, []), ("dense", 0, ["inputs"])]

    def test_afterwards_keras_is_as_before_also_after_an_error(self) -> None:
        before = layers.Layer.__call__
        with keras_adapter.tag_calls(CallList(), lambda layer: True):
            assert layers.Layer.__call__ is not before
        assert layers.Layer.__call__ is before
        with pytest.raises(KeyError), keras_adapter.tag_calls(CallList(), lambda layer: True):
            raise KeyError
        assert layers.Layer.__call__ is before


def test_the_layer_that_is_being_called_is_known_by_name() -> None:
    class Asking(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            named.append(keras_adapter.layer_in_call())
            return x

    named: list[str | None] = [keras_adapter.layer_in_call()]
    Asking(name="asking")(tf.ones([1]))
    assert named == [None, "asking"]


def test_metrics_and_adapting_layers_are_as_before_after_shutdown(init: Callable[..., None]) -> None:
    preprocessing = layers.experimental.preprocessing.PreprocessingLayer
    before = tf_keras.metrics.Metric.add_weight, preprocessing.adapt
    init()
    Net()
    assert tf_keras.metrics.Metric.add_weight is not before[0]
    assert preprocessing.adapt is not before[1]
    smp.shutdown()
    assert (tf_keras.metrics.Metric.add_weight, preprocessing.adapt) == before


def test_keras_draws_the_seeds_of_initializers_from_the_generator_it_is_given() -> None:
    class Fixed(random.Random):
        def randint(self, a: int, b: int) -> int:
            return 5

    keras_adapter.seed_initializers(Fixed())
    drawn = tf_keras.initializers.GlorotUniform()((2, 2)).numpy()
    tf_keras.utils.set_random_seed(1)
    assert (drawn == tf_keras.initializers.GlorotUniform(seed=5)((2, 2)).numpy()).all()

"""What marks a method as Keras's own."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf.keras import bases

pytestmark = pytest.mark.usefixtures("keras_defaults")


@pytest.mark.parametrize("marked", [True, False])
def test_keras_calls_an_overridden_build_before_the_first_call_unless_it_is_marked(marked: bool) -> None:
    built = []

    def build(self: Any, input_shape: Any) -> None:
        built.append(input_shape)

    class Model(tf_keras.Model):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x

    Model.build = bases.not_an_override(build) if marked else build
    Model()(tf.ones([2, 3]))
    assert built == ([] if marked else [(2, 3)])

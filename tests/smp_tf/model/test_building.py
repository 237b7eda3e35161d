"""Computing with weights before a model's first step is refused, and the error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import OwnershipError

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("keras_defaults")]

X = np.linspace(-1.0, 1.0, 4 * 6 * 3, dtype=np.float32).reshape(4, 6, 3)
ON_VALUES = r"Layer '{}' was called on values while its model is being built, and its weight '{}' has no value"
READ = r"Weight '{}' was read while its model is being built\."
RAN = r"A function of weights ran while their model is being built,"


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=2)


def model_with(made: Callable[[Any, Any], Any]) -> tf_keras.Model:
    """A functional model, in which a function makes something of the inputs and of what a layer makes of these."""
    inputs = layers.Input((6, 3), name="inputs")
    hidden = layers.Dense(4, name="hidden")(inputs)
    return tf_keras.Model(inputs, layers.Dense(2, name="head")(hidden + made(inputs, hidden)))


def hidden_of(hidden: Any) -> Any:
    return hidden._keras_history.layer


def run(function: Callable[[tf_keras.Model], Any]) -> Callable[[Any, Any], float]:
    """Runs a model of the tensors so far."""

    def made(inputs: Any, hidden: Any) -> float:
        function(tf_keras.Model(inputs, hidden))
        return 0.0

    return made


def position(positions: Any) -> Any:
    return layers.Embedding(6, 4, name="position")(positions)


def attention() -> Any:
    return layers.MultiHeadAttention(2, 2, name="attention")(tf.ones([1, 6, 4]), tf.ones([1, 6, 4]))


def trained(model: tf_keras.Model) -> None:
    model.compile("sgd", "mse")
    model.fit(X, np.zeros([4, 6, 4]), verbose=0)


REFUSED = {
    "a layer on a range": (ON_VALUES.format("position", "position/embeddings"), lambda i, h: position(tf.range(6))),
    "a layer on an array": (ON_VALUES.format("position", "position/embeddings"), lambda i, h: position(np.arange(6))),
    "a layer of layers": (ON_VALUES.format(".*", "attention/query/kernel"), lambda i, h: attention()),
    "a model on an array": (ON_VALUES.format("hidden", "hidden/kernel"), run(lambda model: model(X))),
    "a weight": (READ.format("hidden/kernel"), lambda i, h: hidden_of(h).kernel.numpy().mean()),
    "an op on a weight": (READ.format("hidden/kernel"), lambda i, h: tf.reduce_sum(hidden_of(h).kernel)),
    "get_weights": (READ.format("hidden/kernel"), lambda i, h: hidden_of(h).get_weights()[0].mean()),
    "get_value": (READ.format("hidden/kernel"), lambda i, h: tf_keras.backend.get_value(hidden_of(h).kernel).mean()),
    "predict": (RAN, run(lambda model: model.predict(X, verbose=0))),
    "fit": (RAN, run(trained)),
    "a tf.function": (RAN, run(lambda model: tf.function(lambda x: model(x))(X))),
}


#: What trains, or has many layers, takes longer.
LONG = ("fit", "a tf.function", "a layer of layers")


@pytest.mark.parametrize("what", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in REFUSED])
def test_what_needs_values_says_what_keras_makes_of_it_and_what_to_write(what: str) -> None:
    message, made = REFUSED[what]
    with pytest.raises(OwnershipError, match=message) as raised:
        smp.DistributedModel(lambda: model_with(made))
    assert "Plain Keras" in str(raised.value)
    assert "rank" not in str(raised.value).partition(". ")[0]


def test_plain_keras_makes_a_constant_of_it_as_the_message_says() -> None:
    model = model_with(lambda i, h: position(tf.range(6)))
    assert [layer.name for layer in model.layers if layer.weights] == ["hidden", "head"]


TAKEN = {
    "a range of a symbolic tensor": lambda i, h: position(tf.range(tf.shape(i)[1])),
    "a Lambda": lambda i, h: position(layers.Lambda(lambda x: tf.range(6))(i)),
    "a constant": lambda i, h: tf.constant([1.0, 2.0, 3.0, 4.0]),
    "an array": lambda i, h: np.array([1.0, 2.0, 3.0, 4.0], np.float32),
    "a constant in a layer": lambda i, h: layers.Add()([h, tf.ones([1, 6, 4])]),
    "a tied weight": lambda i, h: tf.matmul(tf.matmul(h, hidden_of(h).kernel, transpose_b=True), hidden_of(h).kernel),
}


USUAL = "a range of a symbolic tensor"


@pytest.mark.parametrize("what", [pytest.param(name, marks=[pytest.mark.full] * (name != USUAL)) for name in TAKEN])
def test_what_keras_computes_at_every_call_is_part_of_the_model(what: str) -> None:
    tf_keras.utils.set_random_seed(1)
    plain = model_with(TAKEN[what])
    tf_keras.utils.set_random_seed(1)
    model = smp.DistributedModel(lambda: model_with(TAKEN[what]))
    assert [v.name for v in model.trainable_variables] == [v.name for v in plain.trainable_variables]
    model.set_weights(plain.get_weights())
    assert model.predict(X, verbose=0) == pytest.approx(plain.predict(X, verbose=0), abs=1e-6)


def test_in_a_constructor_it_is_the_same() -> None:
    class Net(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.positions = position(tf.range(6))

    with pytest.raises(OwnershipError, match=ON_VALUES.format("position", "position/embeddings")):
        Net()


def test_an_error_of_the_script_stays_what_it_is() -> None:
    with pytest.raises(tf.errors.NotFoundError):
        smp.DistributedModel(lambda: tf.io.read_file("not_there"))


@pytest.mark.parametrize("use", ["a layer", "the wrapped model", "a weight"])
def test_before_the_first_step_a_call_is_told_apart_from_a_read(use: str) -> None:
    model = smp.DistributedModel(lambda: model_with(lambda i, h: 0.0))
    hidden = model.wrapped.get_layer("hidden")
    uses: dict[str, Callable[[], Any]] = {
        "a layer": lambda: hidden(X),
        "the wrapped model": lambda: model.wrapped(X),
        "a weight": lambda: hidden.kernel.numpy(),
    }
    with pytest.raises(OwnershipError, match="Cannot read variable 'hidden/kernel' yet: which rank") as raised:
        uses[use]()
    wanted = "smp.register_post_partition_hook" if use == "a weight" else "in a function decorated with @smp.step"
    assert wanted in str(raised.value)

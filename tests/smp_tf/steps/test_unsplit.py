"""One partition, one microbatch, one replica: a step runs op for op as plain Keras runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.batch.output import StepOutput
from smp_tf.errors import StepError
from smp_tf.steps.unsplit import UnsplitProgram

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10.0


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=1)


def net(base: type) -> Any:
    class Net(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(name="net")
            self.hidden = layers.Dense(4, activation="tanh", kernel_initializer="ones")
            self.head = layers.Dense(2, kernel_initializer="ones")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.head(self.hidden(x))

    return Net()


def forward_backward(model: Any) -> Callable[[tf.Tensor], Any]:
    def train(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    return train


def program(step: Any) -> Any:
    (only,) = step._programs.values()
    return only


def test_it_is_a_program_of_its_own() -> None:
    step = smp.step(forward_backward(net(smp.DistributedModel)))
    step(X)
    assert isinstance(program(step), UnsplitProgram)


def test_the_graph_holds_what_that_of_plain_keras_holds() -> None:
    plain, distributed = net(tf_keras.Model), net(smp.DistributedModel)
    plain.build((None, 3))
    step = smp.step(forward_backward(distributed))
    step(X)

    @tf.function
    def with_smp(x: tf.Tensor) -> Any:
        loss, gradients = step(x)
        return loss.reduce_mean(), [g.accumulate() for g in gradients]

    without = tf.function(forward_backward(plain))
    kinds = [
        Counter(op.type for op in traced.get_concrete_function(tf.constant(X)).graph.get_operations())
        for traced in (with_smp, without)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("in_function", [True, False])
def test_results_are_those_of_plain_keras_to_the_last_bit(in_function: bool) -> None:
    plain, step = net(tf_keras.Model), smp.step(forward_backward(net(smp.DistributedModel)))

    def run(x: tf.Tensor) -> Any:
        loss, gradients = step(x)
        return loss.reduce_mean(), [g.accumulate() for g in gradients]

    plain(X)
    expected = tf.nest.flatten(tf.function(forward_backward(plain))(tf.constant(X)))
    found = tf.nest.flatten((tf.function(run) if in_function else run)(tf.constant(X)))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("in_function", [True, False])
def test_every_kind_of_result_is_a_step_output(in_function: bool) -> None:
    model = net(smp.DistributedModel)
    counter = tf.Variable(3, trainable=False)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        y = model(x)
        return {
            "tensor": y,
            "ragged": tf.RaggedTensor.from_tensor(y),
            "sparse": tf.sparse.from_dense(y),
            "variable": counter,
            "none": None,
            "text": "as it is",
        }

    kinds: dict[str, Any] = {}

    def run(x: tf.Tensor) -> Any:
        found = step(x)
        kinds.update({name: type(value) for name, value in found.items()})
        return {name: found[name].outputs for name in ("tensor", "ragged", "sparse", "variable")}

    values = (tf.function(run) if in_function else run)(tf.constant(X))
    assert kinds == {
        "tensor": StepOutput,
        "ragged": StepOutput,
        "sparse": StepOutput,
        "variable": StepOutput,
        "none": type(None),
        "text": str,
    }
    assert [len(outputs) for outputs in values.values()] == [1, 1, 1, 1]
    assert values["ragged"][0].to_tensor().numpy().tolist() == values["tensor"][0].numpy().tolist()
    assert tf.sparse.to_dense(values["sparse"][0]).numpy().tolist() == values["tensor"][0].numpy().tolist()
    assert int(values["variable"][0]) == 3


def test_sparse_gradients_stay_sparse() -> None:
    class Lookup(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.table = layers.Embedding(5, 2)

        def call(self, tokens: tf.Tensor) -> tf.Tensor:
            return self.table(tokens)

    model = Lookup()

    @smp.step
    def step(tokens: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tokens) * 3.0)
        return tape.gradient(loss, model.trainable_variables)

    (gradient,) = step(np.array([1, 3, 1], np.int32))
    assert isinstance(gradient.accumulate(), tf.IndexedSlices)
    dense = tf.convert_to_tensor(gradient.accumulate())
    assert dense.numpy().tolist() == [[0.0, 0.0], [6.0, 6.0], [0.0, 0.0], [3.0, 3.0], [0.0, 0.0]]


def test_a_model_may_be_called_only_while_the_step_runs() -> None:
    model = net(smp.DistributedModel)
    step = smp.step(forward_backward(model))

    @tf.function
    def run(x: tf.Tensor) -> Any:
        step(x)
        return model(x)

    with pytest.raises(StepError, match="called outside a step"):
        run(tf.constant(X))


def test_an_error_in_the_step_leaves_no_step_open() -> None:
    model = net(smp.DistributedModel)
    fails = [False]

    @smp.step
    def step(x: tf.Tensor) -> tf.Tensor:
        if fails[0]:
            raise KeyError("as asked")
        return model(x)

    step(X)
    fails[0] = True
    with pytest.raises(KeyError, match="as asked"):
        tf.function(lambda x: step(x).reduce_mean())(tf.constant(X))
    with pytest.raises(StepError, match="called outside a step"):
        model(tf.constant(X))


def test_random_ops_make_it_a_split_program_whose_masks_do_not_depend_on_the_partitions() -> None:
    class Masked(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = layers.Dropout(0.5)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.dropout(x, training=True)

    model = Masked()
    step = smp.step(lambda x: model(x))
    step(X)
    assert not isinstance(program(step), UnsplitProgram)

"""Losses and logs that microbatches give otherwise than the whole batch are refused, and all others are as in Keras."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import StepError
from smp_tf.loss_check import batch_tail_values
from tests.full_only import params

pytestmark = pytest.mark.large

RANDOM = np.random.RandomState(3)
X = RANDOM.randn(16, 6).astype(np.float32)
Y = RANDOM.randn(16, 3).astype(np.float32)
WORDS = RANDOM.randint(0, 4, 16)


def mean(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y - p))


def total(y: Any, p: Any) -> Any:
    return tf.reduce_sum(tf.square(y - p))


def over_the_batch(y: Any, p: Any) -> Any:
    return tf.reduce_sum(tf.square(y - p)) / tf.cast(tf.shape(y)[0], tf.float32)


def contrastive(y: Any, p: Any) -> Any:
    scores = tf.matmul(p, y, transpose_b=True)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.range(tf.shape(y)[0]), logits=scores)
    )


def rooted(y: Any, p: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(tf.square(y - p)))


def with_running_sum(y: Any, p: Any) -> Any:
    """Each row is one of the sample alone, although it is made by ops that could mix samples."""
    rows = tf.concat([tf.cumsum(y, 1), p[:, ::-1], tf.ones_like(p)], 1)
    return tf.reduce_mean(tf.linalg.matmul(rows, tf.ones([9, 2])))


def classifier() -> tf_keras.Model:
    return tf_keras.Sequential([layers.Dense(8, activation="tanh", input_shape=(6,)), layers.Dense(3)])


class Counting(layers.Layer):
    """Reads what it has just written, so that no forward pass may run ahead of the step."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight("calls", (), trainable=False, initializer="zeros")

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1.0)
        return inputs + 0.0 * self.calls


def counting() -> tf_keras.Model:
    return tf_keras.Sequential([layers.Dense(8, input_shape=(6,)), Counting(), layers.Dense(3)], "counting")


def fit(model: Any, y: Any = Y, **compiled: Any) -> dict[str, Any]:
    model.compile(tf_keras.optimizers.SGD(0.1), **compiled)
    history = model.fit(X, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {**history, "weights": model.get_weights()}


def compare(build: Callable[[], Any], y: Any = Y, **compiled: Any) -> None:
    plain = build()
    model = smp.DistributedModel(build)
    model.build((None, 6))
    model.set_weights(plain.get_weights())
    wanted, found = fit(plain, y, **compiled), fit(model, y, **compiled)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        for one, other in zip(found[name], values, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("loss", params(["mse", over_the_batch, mean, with_running_sum], [mean, with_running_sum]))
def test_an_average_over_samples_is_that_of_one_process(init: Callable[..., None], loss: Any) -> None:
    init(microbatches=4)
    compare(classifier, loss=loss, metrics=["mae"])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            contrastive,
            r"is \S+ for the whole batch of 16 samples, and \S+ as the average .* compares samples",
        ),
        pytest.param(rooted, "computed of an average", marks=pytest.mark.full),
    ],
)
def test_another_loss_is_refused_with_both_values_and_the_cause(
    init: Callable[..., None], loss: Any, words: str
) -> None:
    init(microbatches=4)
    with pytest.raises(StepError, match=words):
        fit(smp.DistributedModel(counting), loss=loss)


def test_one_microbatch_needs_no_check(init: Callable[..., None]) -> None:
    init(microbatches=1)
    compare(classifier, loss=total, metrics=[rooted])


def test_who_wants_another_training_says_so(init: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    init(microbatches=4, check_losses=False)
    fit(smp.DistributedModel(counting), loss=rooted)
    assert "another training" not in capfd.readouterr().err


def test_a_warning_is_given_once(init: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    init(microbatches=4, check_losses="warn")
    fit(smp.DistributedModel(counting), loss=rooted)
    assert capfd.readouterr().err.count("train_step of model 'counting' is another training in microbatches") == 1


class AddsLoss(layers.Layer):
    """As the variational autoencoders of many tutorials: the divergence, summed over the batch or averaged."""

    def __init__(self, reduce: Callable[[Any], Any]) -> None:
        super().__init__()
        self.reduce = reduce

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.reduce(tf.square(inputs)))
        return inputs


def with_added_loss(reduce: Callable[[Any], Any], *before: layers.Layer) -> tf_keras.Model:
    return tf_keras.Sequential([layers.Dense(3, input_shape=(6,), kernel_regularizer="l2"), *before, AddsLoss(reduce)])


def test_a_loss_that_a_layer_adds_is_looked_at_where_the_layer_makes_it(init: Callable[..., None]) -> None:
    init(microbatches=4)
    compare(lambda: with_added_loss(tf.reduce_mean), loss="mse")
    model = smp.DistributedModel(lambda: with_added_loss(lambda x: tf.sqrt(tf.reduce_mean(x)), Counting()))
    with pytest.raises(StepError, match="is computed of an average"):
        fit(model, loss="mse")


def test_a_state_that_microbatches_write_is_compared(init: Callable[..., None]) -> None:
    """What is printed of a metric keeps it with the microbatches."""
    init(microbatches=4)
    spread = tf_keras.metrics.Mean(name="spread")

    class Printing(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="printing")
            self.dense, self.spread = layers.Dense(3), spread

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            self.spread.update_state(tf.math.reduce_std(self(data[0])))
            tf.print(self.spread.result(), output_stream=sys.stderr)
            return super().train_step(data)

    model = Printing()
    model.compile("sgd", "mse")
    with pytest.raises(StepError, match=r"Its metric 'spread' \(variable 'total'\) grows by"):
        model.fit(X, Y, batch_size=16, verbose=0)


def with_step(compute: Callable[[Any, Any, Any], Any]) -> Any:
    """A distributed model that applies, and logs, what a function makes of its gradients."""

    class Net(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.first, self.second = layers.Dense(4), layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            weights = self.trainable_variables
            gradients, logs = compute(tape.gradient(loss, weights), weights, loss)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss, **logs}

    return Net()


def halved_and_decayed(gradients: Any, weights: Any, loss: Any) -> Any:
    return [g / 2.0 + 0.01 * w for g, w in zip(gradients, weights, strict=True)], {}


def centralised(gradients: Any, weights: Any, loss: Any) -> Any:
    return [g - tf.reduce_mean(g, 0, keepdims=True) for g in gradients], {}


@pytest.mark.parametrize("compute", [halved_and_decayed, centralised])
def test_what_is_linear_in_gradients_goes_through(init: Callable[..., None], compute: Any) -> None:
    init(microbatches=4)
    fit(with_step(compute))


def test_what_is_not_linear_in_sparse_gradients_is_told_with_its_op(init: Callable[..., None]) -> None:
    init(microbatches=4)

    class Looking(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="looking")
            self.words, self.dense = layers.Embedding(5, 4), layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(self.words(x))

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            weights = self.trainable_variables
            gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.1)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss, "norm": norm}

    model = Looking()
    model.compile("sgd")
    with pytest.raises(StepError, match=r"it computes op '\S+' \(L2Loss\), which is not linear"):
        model.fit(WORDS, Y, batch_size=16, verbose=0)


def test_states_of_metrics_stay_as_the_step_left_them(init: Callable[..., None]) -> None:
    init(microbatches=4)
    plain, split = classifier(), smp.DistributedModel(classifier)
    split.build((None, 6))
    split.set_weights(plain.get_weights())
    states = []
    for model in (plain, split):
        model.compile("sgd", "mse", metrics=["mae"])
        model.train_on_batch(X, Y)
        states.append([float(v) for metric in model.metrics for v in metric.variables])
    np.testing.assert_allclose(states[1], states[0], rtol=1e-5)


def noisy(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y + tf.random.uniform([]) - p))


def test_what_cannot_be_compared_is_said(init: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    init(microbatches=4)
    fit(smp.DistributedModel(classifier), loss=noisy)
    assert "check_losses does not hold this against the whole batch: loss: it depends on random numbers" in (
        capfd.readouterr().err
    )


def test_a_generator_of_random_numbers_may_go_on_in_every_microbatch(init: Callable[..., None]) -> None:
    init(microbatches=4)
    generator = tf.random.Generator.from_seed(1)

    class Noisy(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="noisy")
            self.dense, self.generator = layers.Dense(3), generator

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            return {**super().train_step(data), "drawn": self.generator.normal([])}

    fit(Noisy(), loss="mse")


def padded(lengths: Any) -> tf.data.Dataset:
    """Sequences of unknown lengths, padded to the longest of a batch."""
    steps = tf.data.Dataset.from_tensor_slices((lengths, Y)).map(lambda n, y: (tf.ones([n, 2]), y))
    return steps.padded_batch(8, padded_shapes=([None, 2], [3]))


def test_lengths_that_nobody_knows_ahead_are_those_of_the_batch(init: Callable[..., None]) -> None:
    init(microbatches=2)
    data = padded(RANDOM.randint(1, 6, 16))
    found = {}
    inputs = tf_keras.Input((None, 2))
    plain = tf_keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(layers.Dense(4)(inputs))))
    split = smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))
    split.build((None, None, 2))
    split.set_weights(plain.get_weights())
    for name, model in (("plain", plain), ("split", split)):
        model.compile("sgd", "mse", metrics=["mae"])
        found[name] = model.fit(data, epochs=2, verbose=0).history
    for key, values in found["plain"].items():
        np.testing.assert_allclose(found["split"][key], values, rtol=1e-5)


def test_a_check_that_fails_is_said_and_ends_no_training(
    init: Callable[..., None], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    init(microbatches=4)

    def failing(*arguments: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setattr(batch_tail_values.TailValues, "compute", failing)
    fit(smp.DistributedModel(classifier), loss="mse")
    assert "cannot be computed of its microbatches: ValueError: no such thing." in capfd.readouterr().err


def stepping(loss_of: Callable[[Any, Any, Any, Any], Any], outputs: int = 3) -> Any:
    """A distributed model whose `train_step` takes a loss of its own, given the model, the tape, inputs and targets."""

    class Own(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="own")
            self.first, self.second = layers.Dense(4, activation="tanh"), layers.Dense(outputs)

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(self, tape, x, y)
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            return {"loss": loss}

    return Own()


def triplet(model: Any, tape: Any, x: Any, y: Any) -> Any:
    """The model is called once, on samples and two augmented copies of them."""
    anchor, near, far = tf.split(model(tf.concat([x, x + 1.0, 2.0 * x], 0)), 3, 0)
    return tf.reduce_mean(tf.nn.relu(tf.reduce_sum((anchor - near) ** 2 - (anchor - far) ** 2, -1) + 1.0))


def with_counter(model: Any, tape: Any, x: Any, y: Any) -> Any:
    """The weight of a loss grows with a counter that the step moves on."""
    return tf.reduce_mean((y - model(x)) ** 2) * (1.0 + tf.cast(model.optimizer.iterations, tf.float32))


def recomputed(model: Any, tape: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((y - model.second(tf.recompute_grad(model.first)(x))) ** 2)


def penalty(model: Any, tape: Any, x: Any, y: Any) -> Any:
    """The gradient penalty of a critic: the norm of each sample's gradient by its inputs."""
    with tf.GradientTape() as inner:
        inner.watch(x)
        score = model(x)
    slopes = inner.gradient(score, x)
    return tf.reduce_mean((tf.sqrt(tf.reduce_sum(slopes**2, -1)) - 1.0) ** 2) + tf.reduce_mean((y - score) ** 2)


def by_time(model: Any, tape: Any, x: Any, y: Any) -> Any:
    """Predictions and targets with time in front."""
    steps = tf.reshape(tf.transpose(tf.reshape(model(x), [-1, 3, 1]), [1, 0, 2]), [-1, 1])
    return tf.reduce_mean((steps - tf.reshape(tf.transpose(y), [-1, 1])) ** 2)


RIGHT = [triplet, with_counter, penalty, recomputed, by_time]


@pytest.mark.parametrize("loss_of", params(RIGHT, [recomputed, by_time]))
def test_a_right_loss_is_let_through_however_it_is_made(init: Callable[..., None], loss_of: Any) -> None:
    init(microbatches=4)
    fit(stepping(loss_of))


@pytest.mark.parametrize("policy", params(["mixed_float16", "mixed_bfloat16"], ["mixed_bfloat16"]))
def test_narrow_floats_round_and_scales_of_losses_move(init: Callable[..., None], policy: str) -> None:
    """The first steps of a training in float16 overflow, which halves the scale."""
    init(microbatches=4)
    tf_keras.mixed_precision.set_global_policy(policy)
    try:
        model = smp.DistributedModel(classifier)
        model.compile(tf_keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        model.fit(X, 30.0 * Y, batch_size=16, epochs=2, verbose=0)
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")


def test_ops_that_only_microbatches_have_take_no_names_of_others(init: Callable[..., None]) -> None:
    init(microbatches=4)

    class Two(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="two")
            self.dense = layers.Dense(3)
            self.t, self.u = tf_keras.metrics.Mean(name="t"), tf_keras.metrics.Mean(name="u")

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            p = self(x)
            self.t.update_state(tf.reduce_mean(y / 2.0))
            self.u.update_state(tf.abs(tf.cast(y, tf.float32) / 2.0 - p / 2.0))
            return {**super().train_step(data), "u": self.u.result()}

    fit(Two(), loss="mse")


def only_finite(gradients: Any, weights: Any, loss: Any) -> Any:
    return [tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)) for g in gradients], {}


def test_gradients_that_are_not_finite_may_be_left_out(init: Callable[..., None]) -> None:
    init(microbatches=4)
    fit(with_step(only_finite))

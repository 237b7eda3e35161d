"""Loops of a script's own, in plain Keras and with `@smp.step(whole_batch=True)`, and by how much they differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.batch.output import StepOutput
from tests.smp_tf.whole_batch.own_gradients import Uses, clipped_and_logged

#: Given a model and a variable of the script's, returns the function of a step: what is applied, and what is logged.
Make = Callable[[Any, tf.Variable], Callable[..., Any]]
#: Batches of 44 samples: an odd one, one of another size, and one of fewer samples than there are microbatches.
SIZES = (21, 20, 3)


def net_of(base: type) -> Any:
    """Returns a model of three layers."""

    class Net(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(name="net")
            self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(8)
            self.third = layers.Dense(3)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.third(self.second(self.first(x)))

    return Net()


def f1(y: Any, p: Any) -> Any:
    """An F1 score: a ratio of sums over samples."""
    true, found = tf.cast(y > 0.3, p.dtype), tf.cast(p > 0.1, p.dtype)
    return 2 * tf.reduce_sum(true * found) / (tf.reduce_sum(true) + tf.reduce_sum(found) + 1e-9)


def mean(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y - p))


def training(loss_of: Callable[[Any, Any], Any], use: Callable[..., Any] = clipped_and_logged) -> Make:
    """Returns what makes the function of a step that makes something of its gradients."""

    def make(model: Any, state: tf.Variable) -> Callable[..., Any]:
        def forward_backward(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                p = model(x, training=True)
                loss = loss_of(y, p)
            weights = model.trainable_variables
            gradients, logs = use(tape.gradient(loss, weights), weights, loss, state)
            far = tf.reduce_max(tf.abs(y - p))
            return gradients, {"loss": loss, "f1": f1(y, p), "outputs": p, "far": far, "logs": logs}

        return forward_backward

    return make


def penalised(model: Any, state: tf.Variable) -> Callable[..., Any]:
    """As a critic of a GAN has it: the gradient by inputs goes into the loss, and its norm into the logs."""

    def forward_backward(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = model(x)
            slopes = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(scores, x)), -1) + 1e-12)
            penalty = tf.reduce_sum(tf.square(slopes - 1.0))
            loss = tf.reduce_mean(scores) + 0.1 * penalty
        gradients = tape.gradient(loss, model.trainable_variables[:-1])
        return [*gradients, None], {"loss": loss, "penalty": penalty, "steepest": tf.reduce_max(slopes)}

    return forward_backward


def counting(model: Any, state: tf.Variable) -> Callable[..., Any]:
    """A loss has a weight that the step counts up, and one that it reads before."""

    def forward_backward(x: Any, y: Any) -> Any:
        before = 2.0 * state
        state.assign_add(0.25)
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = state * mean(y, p) + before * tf.reduce_sum(tf.square(p))
        return tape.gradient(loss, model.trainable_variables), {"loss": loss, "state": state.read_value()}

    return forward_backward


def value_of(result: Any) -> Any:
    """Returns the only value of a result; None where another rank has it."""
    if not isinstance(result, StepOutput):
        return result
    if not result.is_local:
        assert result.accumulate() is None
        return None
    [value] = result.outputs
    return value


def batches(sizes: Sequence[int | Sequence[int]] = SIZES, replica: int | None = None) -> list[tuple[Any, Any]]:
    """Returns batches.

    Args:
        sizes: their samples; for each batch one number, or those of all replicas.
        replica: the replica that they are for; None for batches of all replicas.
    """
    x, y = (np.concatenate([part, part]) for part in (Uses.X, Uses.Y))
    of_replicas = [[size] if isinstance(size, int) else list(size) for size in sizes]
    begins = np.cumsum([0, *map(sum, of_replicas)])
    found = []
    for begin, of_each in zip(begins, of_replicas, strict=False):
        first = begin + (sum(of_each[:replica]) if replica is not None else 0)
        mine = slice(first, first + (of_each[replica] if replica is not None else sum(of_each)))
        found.append((tf.constant(x[mine]), tf.constant(y[mine])))
    return found


def train(
    base: type, make: Make, *, eager: bool, sizes: Sequence[int | Sequence[int]] = SIZES, **options: Any
) -> list[np.ndarray]:
    """Trains; returns what was logged of each batch, and the weights.

    Args:
        base: the class of the model, of which `tf_keras.Model` is plain Keras.
        make: makes the function of the step.
        eager: whether the step is called outside of a `tf.function`.
        sizes: the batches' samples; with several replicas, those of each.
        **options: options of the step.
    """
    model, state = net_of(base), tf.Variable(0.1, trainable=False, dtype=tf.float64)
    model.build((None, 6))
    model.set_weights(Uses.weights(((6, 8), (8,), (8, 8), (8,), (8, 3), (3,))))
    optimizer = tf_keras.optimizers.SGD(0.05, momentum=0.9)
    step = make(model, state)
    if base is not tf_keras.Model:
        step = smp.step(step, whole_batch=True, **options)

    def once(x: Any, y: Any) -> Any:
        gradients, logs = tf.nest.map_structure(value_of, step(x, y))
        if gradients:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return logs

    # Plain Keras runs op by op: in a graph, TensorFlow may read a weight for the loss when it is updated already.
    once = once if eager or base is tf_keras.Model else tf.function(once)
    replica = smp.dp_rank() if base is not tf_keras.Model and smp.dp_size() > 1 else None
    logged = [tf.nest.flatten(once(*batch)) for _ in range(2) for batch in batches(sizes, replica)]
    return [*(np.asarray(value) for logs in logged for value in logs), *model.get_weights(), state.numpy()]


def compare(make: Make, *, eager: bool = False, sizes: Sequence[int | Sequence[int]] = SIZES, **options: Any) -> float:
    """Returns the largest difference between plain Keras and a split training, relative to one.

    Args:
        make: makes the function of the step.
        eager: whether the step is called outside of a `tf.function`.
        sizes: the batches' samples; with several replicas, those of each.
        **options: options of the step.
    """
    plain = train(tf_keras.Model, make, eager=False, sizes=sizes)
    split = train(smp.DistributedModel, make, eager=eager, sizes=sizes, **options)
    assert [value.shape for value in plain] == [value.shape for value in split]
    return max(
        float(np.abs(one - other).max(initial=0.0) / max(1.0, np.abs(other).max(initial=0.0)))
        for one, other in zip(split, plain, strict=True)
    )


@contextlib.contextmanager
def in_float64() -> Any:
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
    try:
        yield
    finally:
        tf_keras.backend.set_floatx("float32")
        tf_keras.mixed_precision.set_global_policy("float32")


def with_local_outputs(model: Any) -> Any:
    """A step that leaves its outputs on the last stage, and gives a score of the batch to all."""

    @smp.step(whole_batch=True, local_outputs=["outputs"])
    def forward(x: tf.Tensor, y: tf.Tensor) -> Any:
        p = model(x)
        return {"outputs": p, "f1": f1(y, p)}

    return forward

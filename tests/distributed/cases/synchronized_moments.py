"""Trains models whose normalization takes moments over the samples of all replicas; says whether plain Keras agrees.

Plain Keras, in one process, is given the microbatches with one number of all replicas as a batch, each in turn. Its
loss is that of what comes out of all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.batch.microbatches import sizes_of
from smp_tf.job import runtime
from tests.smp_tf.whole_batch.own_losses import in_batch_softmax

RATE = 0.3
#: By name: makes a normalization that takes its moments over all replicas.
NORMS: dict[str, Callable[..., Any]] = {
    "keras": lambda **named: layers.BatchNormalization(synchronized=True, **named),
    "older": lambda **named: layers.experimental.SyncBatchNormalization(**named),
    "horovod": lambda **named: hvd.SyncBatchNormalization(**named),
    "plain": lambda **named: layers.BatchNormalization(fused=False, **named),
}


def mean(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(y - p))


LOSSES = {"mean": mean, "in_batch_softmax": in_batch_softmax}
OWN_LOOPS = ("step", "whole batch")
#: The batches of an evaluation, by replica.
EVALUATED = (2, 1)


class Net(tf_keras.Model):
    """Dense layers with a normalization after each but the last."""

    def __init__(self, norm: str, depth: int = 3) -> None:
        super().__init__(name="net")
        self.hidden = [layers.Dense(5, activation="tanh") for _ in range(depth)]
        self.norms = [NORMS[norm](name=f"norm_{number}", momentum=0.5) for number in range(depth)]
        self.head = layers.Dense(2, dtype=tf_keras.backend.floatx())

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        for dense, norm in zip(self.hidden, self.norms, strict=True):
            x = norm(dense(x), training=training)
        return self.head(x)


def batch_of(replica: int, step: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of a replica."""
    random = np.random.RandomState(100 * step + replica)
    x, y = 2.0 + replica + random.randn(samples, 4), random.randn(samples, 2)
    return x.astype(tf_keras.backend.floatx()), y.astype(tf_keras.backend.floatx())


def evaluated(replica: int) -> tuple[np.ndarray, np.ndarray]:
    """What a replica evaluates: so many batches of eight samples."""
    return batch_of(replica, 99, 8 * EVALUATED[replica])


def initial_weights(shapes: Sequence[Any]) -> list[np.ndarray]:
    random = np.random.RandomState(7)
    return [0.4 * random.randn(*shape) if len(shape) > 1 else 0.5 + random.rand(*shape) for shape in shapes]


def expected(loss: str, sizes: Sequence[Sequence[int]], microbatches: int) -> Any:
    """The model that plain Keras trains.

    Args:
        loss: name of the loss.
        sizes: for each step, samples in the batch of each replica.
        microbatches: how many a replica makes of a batch that is large enough.
    """
    model = Net("plain")
    model.build((None, 4))
    model.set_weights(initial_weights([v.shape for v in model.variables]))
    optimizer = tf_keras.optimizers.SGD(RATE)
    for step, of_step in enumerate(sizes):
        batches = [batch_of(replica, step, samples) for replica, samples in enumerate(of_step)]
        cuts = [sizes_of(samples, min(samples, microbatches)) for samples in of_step]
        with tf.GradientTape() as tape:
            outputs: list[list[tf.Tensor]] = [[] for _ in of_step]
            for number in range(max(map(len, cuts))):
                present = [replica for replica, cut in enumerate(cuts) if number < len(cut)]
                parts = [_part(batches[replica][0], cuts[replica], number) for replica in present]
                made = tf.split(model(np.concatenate(parts), training=True), [len(part) for part in parts])
                for replica, output in zip(present, made, strict=True):
                    outputs[replica].append(output)
            joined = tf.concat([output for own in outputs for output in own], 0)
            value = LOSSES[loss](np.concatenate([y for _, y in batches]), joined)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model


def _part(x: np.ndarray, cut: Sequence[int], number: int) -> np.ndarray:
    begin = sum(cut[:number])
    return x[begin : begin + cut[number]]


def loop_of(model: Any, loss: str, *, whole_batch: bool) -> Callable[[np.ndarray, np.ndarray], None]:
    """A loop of a script's own."""
    optimizer = tf_keras.optimizers.SGD(RATE)

    @smp.step(whole_batch=whole_batch)
    def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = LOSSES[loss](y, model(x, training=True))
        return value, tape.gradient(value, model.trainable_variables)

    @tf.function
    def train(x: tf.Tensor, y: tf.Tensor) -> None:
        _, gradients = forward_backward(x, y)
        sums = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))

    return lambda x, y: train(tf.constant(x), tf.constant(y))


def loop_of_keras(model: Any, method: str, loss: str) -> Callable[[np.ndarray, np.ndarray], Any]:
    model.compile(tf_keras.optimizers.SGD(RATE), LOSSES[loss])
    if method == "train_on_batch":
        return lambda x, y: model.train_on_batch(x, y)
    return lambda x, y: model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)


@contextlib.contextmanager
def policy_in_force(policy: str) -> Iterator[None]:
    tf_keras.backend.set_floatx("float64" if policy == "float64" else "float32")
    tf_keras.mixed_precision.set_global_policy(policy)
    try:
        yield
    finally:
        tf_keras.backend.set_floatx("float32")
        tf_keras.mixed_precision.set_global_policy("float32")


def trained(
    norm: str = "keras",
    loop: str = "step",
    sizes: Sequence[Sequence[int]] = ((8, 8),),
    loss: str = "mean",
    policy: str = "float64",
) -> float:
    """How far weights of this rank are from those of plain Keras, and moving averages where it had all microbatches.

    After a loop of Keras's, an evaluation is compared, too. Replicas have different numbers of batches in it.
    """
    running = runtime.current()
    with policy_in_force(policy):
        model = smp.DistributedModel(lambda: Net(norm))
        model.build((None, 4))
        wanted = expected(loss, sizes, running.config.microbatches)
        model.set_weights(initial_weights([variable.shape for variable in wanted.variables]))
        if loop in OWN_LOOPS:
            train = loop_of(model, loss, whole_batch=loop == "whole batch")
        else:
            train = loop_of_keras(model, loop, loss)
        replica = running.topology.replica
        for step, of_step in enumerate(sizes):
            train(*batch_of(replica, step, of_step[replica]))
        most = running.config.microbatches
        has_all = all(min(most, of_step[replica]) == min(most, max(of_step)) for of_step in sizes)
        local = {id(variable) for variable in model.local_variables if variable.trainable or has_all}
        differences = [
            float(np.max(np.abs(variable.numpy() - other.numpy())))
            for variable, other in zip(model.variables, wanted.variables, strict=True)
            if id(variable) in local
        ]
        assert differences
        if loop not in OWN_LOOPS and loss == "mean" and has_all:
            found = model.evaluate(*evaluated(replica), batch_size=8, verbose=0)
            parts = [mean(y, wanted(x)) * len(x) for x, y in map(evaluated, range(len(EVALUATED)))]
            differences.append(abs(found - float(sum(parts)) / (8 * sum(EVALUATED))))
        return max(differences)


def moving_averages() -> list[np.ndarray]:
    """The moving averages, in float32, of a model that was trained on batches of other sizes on each replica."""
    model = smp.DistributedModel(lambda: Net("keras"))
    train = loop_of_keras(model, "train_on_batch", "mean")
    replica = runtime.current().topology.replica
    for step in range(3):
        train(*batch_of(replica, step, 12 + replica))
    return [variable.numpy() for variable in model.non_trainable_variables]

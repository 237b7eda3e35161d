"""Trains models whose normalization takes moments over the samples of all replicas; says whether plain Keras agrees.

Plain Keras, in one process, is given the microbatches with one number of all replicas as a batch, and adds up its
gradients over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.batch.microbatches import sizes_of
from smp_tf.job import runtime
from tests.smp_tf.whole_batch.own_loops import in_float64

RATE = 0.3
#: By name: makes a normalization that takes its moments over all replicas.
NORMS: dict[str, Callable[..., Any]] = {
    "keras": lambda **named: layers.BatchNormalization(synchronized=True, **named),
    "older": lambda **named: layers.experimental.SyncBatchNormalization(**named),
    "horovod": lambda **named: hvd.SyncBatchNormalization(**named),
    "plain": lambda **named: layers.BatchNormalization(fused=False, **named),
}


class Net(tf_keras.Model):
    """Dense layers with a normalization after each but the last."""

    def __init__(self, norm: str, depth: int = 3) -> None:
        super().__init__(name="net")
        self.hidden = [layers.Dense(5, activation="tanh") for _ in range(depth)]
        self.norms = [NORMS[norm](name=f"norm_{number}", momentum=0.5) for number in range(depth)]
        self.head = layers.Dense(2)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        for dense, norm in zip(self.hidden, self.norms, strict=True):
            x = norm(dense(x), training=training)
        return self.head(x)


def batch_of(replica: int, step: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of a replica."""
    random = np.random.RandomState(100 * step + replica)
    return 2.0 + replica + random.randn(samples, 4), random.randn(samples, 2)


def initial_weights(shapes: Sequence[Any]) -> list[np.ndarray]:
    random = np.random.RandomState(7)
    return [np.abs(random.randn(*shape)) + 0.1 for shape in shapes]


def expected(sizes: Sequence[Sequence[int]], microbatches: int) -> list[np.ndarray]:
    """Weights of plain Keras.

    Args:
        sizes: for each step, samples in the batch of each replica.
        microbatches: how many a replica makes of a batch that is large enough.
    """
    model = Net("plain")
    model.build((None, 4))
    model.set_weights(initial_weights([v.shape for v in model.variables]))
    optimizer = tf_keras.optimizers.SGD(RATE)
    for step, of_step in enumerate(sizes):
        batches = [batch_of(replica, step, samples) for replica, samples in enumerate(of_step)]
        cuts = [np.cumsum((0, *sizes_of(samples, min(samples, microbatches)))) for samples in of_step]
        totals = [tf.zeros(v.shape, v.dtype) for v in model.trainable_variables]
        for number in range(max(map(len, cuts)) - 1):
            parts = [
                (x[cut[number] : cut[number + 1]], y[cut[number] : cut[number + 1]])
                for (x, y), cut in zip(batches, cuts, strict=True)
                if number + 1 < len(cut)
            ]
            x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            with tf.GradientTape() as tape:
                own = tf.reduce_sum(tf.reduce_mean(tf.square(y - model(x, training=True)), -1)) / sum(of_step)
            totals = [a + b for a, b in zip(totals, tape.gradient(own, model.trainable_variables), strict=True)]
        optimizer.apply_gradients(zip(totals, model.trainable_variables, strict=True))
    return [v.numpy() for v in model.variables]


def loop_of(model: Any) -> Callable[[np.ndarray, np.ndarray], None]:
    """A loop of a script's own."""
    optimizer = tf_keras.optimizers.SGD(RATE)

    @smp.step
    def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def train(x: tf.Tensor, y: tf.Tensor) -> None:
        _, gradients = forward_backward(x, y)
        sums = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))

    return lambda x, y: train(tf.constant(x), tf.constant(y))


def compiled(model: Any, method: str) -> Callable[[np.ndarray, np.ndarray], Any]:
    """A loop of Keras's."""
    model.compile(tf_keras.optimizers.SGD(RATE), "mse")
    if method == "train_on_batch":
        return lambda x, y: model.train_on_batch(x, y)
    return lambda x, y: model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)


@in_float64()
def trained(norm: str = "keras", loop: str = "step", sizes: Sequence[Sequence[int]] = ((8, 8),)) -> float:
    """How far weights of this rank are from those of plain Keras, and moving averages where it had all microbatches."""
    running = runtime.current()
    model = smp.DistributedModel(lambda: Net(norm))
    model.build((None, 4))
    wanted = expected(sizes, running.config.microbatches)
    model.set_weights(initial_weights([array.shape for array in wanted]))
    train = loop_of(model) if loop == "step" else compiled(model, loop)
    replica = running.topology.replica
    for step, of_step in enumerate(sizes):
        train(*batch_of(replica, step, of_step[replica]))
    most = running.config.microbatches
    has_all = all(min(most, of_step[replica]) == min(most, max(of_step)) for of_step in sizes)
    local = {id(variable) for variable in model.local_variables if variable.trainable or has_all}
    differences = [
        np.max(np.abs(variable.numpy() - array))
        for variable, array in zip(model.variables, wanted, strict=True)
        if id(variable) in local
    ]
    assert differences
    return float(max(differences))

"""Trains with losses that microbatches, replicas or stages give otherwise than one process; says what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import StepError
from smp_tf.loss_check.kept_values import bring_together

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(16, 6).astype(np.float32)
Y = RANDOM.randn(16, 3).astype(np.float32)


def model() -> tf_keras.Model:
    return tf_keras.Sequential(
        [layers.Dense(8, activation="tanh", input_shape=(6,)), layers.Dense(7, activation="tanh"), layers.Dense(3)],
        "net",
    )


def of_positives(y: Any, p: Any) -> Any:
    chosen = tf.cast(y > 0.3, tf.float32)
    return tf.reduce_sum(chosen * tf.square(y - p)) / tf.reduce_sum(chosen)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda y, p: tf.reduce_sum(tf.square(y - p)),
    "positives": of_positives,
    "rooted": lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p))),
    "mean": lambda y, p: tf.reduce_mean(tf.square(y - p)),
}


class LateScaling(tf_keras.optimizers.SGD):
    """Divides by the norm of all that it is given, and goes on when the weights have changed."""

    def apply_gradients(self, grads_and_vars: Any, **more: Any) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(g**2) for g in gradients]))
        super().apply_gradients(zip([g / norm for g in gradients], variables, strict=True), **more)
        return variables[0].assign_add(tf.zeros_like(variables[0]))


class Padded(tf_keras.Model):
    """A model that looks at the first of two inputs. The second is of another width on each replica."""

    def __init__(self) -> None:
        super().__init__(name="padded")
        self.net = model()

    def call(self, x: Any) -> Any:
        return self.net(x[0])


def refusal(loss: str, optimizer: str = "sgd", pads: bool = False) -> str:
    """What `fit` says of a loss or an optimizer in an error; nothing where it trains."""
    split = smp.DistributedModel(Padded if pads else model)
    split.compile(
        LateScaling(0.1) if optimizer == "late_scaling" else optimizer, LOSSES[loss], metrics=[LOSSES["mean"]]
    )
    mine = slice(smp.dp_rank(), None, smp.dp_size())
    try:
        x = (X[mine], np.zeros([len(X[mine]), 2 + smp.dp_rank()], np.float32)) if pads else X[mine]
        split.fit(x, Y[mine], batch_size=16 // smp.dp_size(), shuffle=False, verbose=0)
    except StepError as error:
        return str(error)
    return ""


def brought(of_all_replicas: bool) -> list[Any] | None:
    """What the collector gets of tensors 0 (stage 0) and 1 (stage 1), two microbatches, a change and an argument."""
    stage, replica = smp.mp_rank(), smp.dp_rank()
    own = {stage: [np.full([microbatch + 1], 10 * replica + stage, np.float32) for microbatch in range(2)]}
    found = bring_together(
        own,
        [np.int32(replica)],
        {3: np.full([2], replica, np.float64)},
        stages=[0, 1],
        collector=1,
        microbatches=2,
        of_all_replicas=of_all_replicas,
    )
    if found is None:
        return None
    return [
        [[v.tolist() for v in kept] for kept in one.kept] + [int(one.changes[0]), one.arguments[3].tolist()]
        for one in found
    ]

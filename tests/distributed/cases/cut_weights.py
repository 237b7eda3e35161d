"""Trainings in which one weight is so large that replicas share its rows."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.keras.optimizer_slots import innermost, slots
from smp_tf.pipeline.run.reduction import parts_of
from smp_tf.pipeline.run.stage_program import build_stage_program
from smp_tf.replicas import reduce_scatter
from smp_tf.sharding import layouts
from smp_tf.steps import preparation
from tests.distributed.cases.sent_bytes import counted

SAMPLES, WORDS, WIDTH = 12, 6001, 8


def _adam() -> Any:
    optimizer = tf_keras.optimizers.Adam(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["table"])
    return optimizer


#: What looks at weights, at lists of gradients, at numbers of variables, or at whole weights.
OPTIMIZERS = {
    "adam": _adam,
    "clipped": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "averages": lambda: tf_keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "finalized": lambda: tf_keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.01),
    "scaled": lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.RMSprop(0.01), False, 8.0),
    "adafactor": lambda: tf_keras.optimizers.Adafactor(0.1),
    "clipnorm": lambda: tf_keras.optimizers.Adam(0.01, clipnorm=0.01),
}


def _replaced() -> Any:
    """One whose `apply_gradients` the script has put something else in place of, which looks at gradients."""
    optimizer = tf_keras.optimizers.Adam(0.01)
    given = optimizer.apply_gradients

    def apply_gradients(pairs: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(pairs)
        assert all(g.shape == v.shape for g, v in pairs if g is not None)
        return given([(g if g is None else g / (1.0 + 0.0 * tf.norm(g)), v) for g, v in pairs], *args, **kwargs)

    optimizer.apply_gradients = apply_gradients
    return optimizer


#: What `fit` is given besides.
IN_FIT = OPTIMIZERS | {
    "averaging": lambda: smp.DistributedOptimizer(tf_keras.optimizers.Adam(0.01)),
    "replaced": _replaced,
}


class Table(layers.Layer):
    """Rows of a table: gathered, or of a copy, so that the gradient is dense."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(name="lookup")
        self.sparse = sparse
        start = tf_keras.initializers.RandomNormal(seed=8)
        self.table = self.add_weight("table", [WORDS, WIDTH], initializer=start)

    def call(self, words: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.table if self.sparse else self.table * 1.0, words)


class Net(smp.DistributedModel):
    """A large table and small layers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(name="net")
        start = tf_keras.initializers.RandomNormal(seed=7)
        self.lookup = Table(sparse)
        self.hidden = layers.Dense(30, activation="tanh", kernel_initializer=start)
        self.head = layers.Dense(2, kernel_initializer=start)

    def call(self, words: tf.Tensor) -> tf.Tensor:
        x = tf.reshape(self.lookup(words), [-1, 5 * WIDTH])
        return self.head(self.hidden(x))


class OwnStepNet(Net):
    """The same, whose own `train_step` tells the loss of a batch under a metric's name.

    Args:
        clips: it gives its optimizer what it has made of gradients; else it tells some of them.
    """

    def __init__(self, clips: bool) -> None:
        super().__init__(sparse=False)
        self.clips = clips

    def train_step(self, data: Any) -> Any:
        words, wanted = data
        with tf.GradientTape() as tape:
            loss = self.compiled_loss(wanted, self(words, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        told = {} if self.clips else {"of table": gradients[0], "of hidden": gradients[1]}
        if self.clips:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, **told}


def batch(step: int) -> np.ndarray:
    """This replica's part of a batch."""
    whole = np.random.RandomState(step).randint(0, WORDS, (SAMPLES, 5))
    return whole[smp.dp_rank() :: smp.dp_size()]


def trained(optimizer: str, sparse: bool = False, eager: bool = False, directory: str = "", restore: str = "") -> Any:
    """Steps of an optimizer.

    Args:
        optimizer: a key of `OPTIMIZERS`.
        sparse: gradients of the table are slices.
        eager: apply gradients outside a tf.function.
        directory: where a checkpoint is saved after two of four steps.
        restore: where one is restored from, before the last two.
    """
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
    net, made = Net(sparse), OPTIMIZERS[optimizer]()

    @smp.step
    def step(words: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(words) - 1.0) ** 2)
            told = made.get_scaled_loss(loss) if optimizer == "scaled" else loss
        return tape.gradient(told, net.trainable_variables), loss

    def train(words: tf.Tensor) -> tf.Tensor:
        gradients, loss = step(words)
        sums = [gradient.accumulate() for gradient in gradients]
        if optimizer == "scaled":
            sums = made.get_unscaled_gradients(sums)
        made.apply_gradients(zip(sums, net.trainable_variables, strict=True))
        return loss.reduce_mean()

    run = train if eager else tf.function(train)
    manager = smp.CheckpointManager(tf.train.Checkpoint(model=net, optimizer=made), directory or restore or "unused")
    if restore:
        manager.restore()
    sent: dict[str, int] = {}
    for number in range(2 if restore else 0, 4):
        with counted("smp_weights") as given:
            run(tf.constant(batch(number)))
        sent = sent or given
        if directory and number == 1:
            manager.save()
        if number == 2:
            # What a script assigns between steps is what is trained on.
            for variable in net.local_trainable_variables:
                variable.assign(variable * 0.5)
    if optimizer == "finalized":
        made.finalize_variable_values(net.trainable_variables)
    return _found(net, made, sent)


def fitted(optimizer: str, sparse: bool = False, round_bytes: int = 0, clips: bool = False) -> Any:
    """Batches of `fit`, which applies gradients itself.

    Args:
        optimizer: a key of `IN_FIT`.
        sparse: gradients of the table are slices.
        round_bytes: how much of one gradient is sent at once, at most; 0: as much as always.
        clips: whether the model's `train_step` clips each microbatch's gradients.
    """
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
    net, made = OwnStepNet(clips=True) if clips else Net(sparse), IN_FIT[optimizer]()
    net.compile(made, "mse")
    words = np.concatenate([batch(number) for number in range(4)])
    data = tf.data.Dataset.from_tensor_slices((words, np.ones([len(words), 2])))
    limit = round_bytes or reduce_scatter.MOST_BYTES
    # Of slices it is not known before how many there are.
    counting: Any = contextlib.nullcontext({}) if sparse else counted()
    programs: list[Any] = []

    def built(*args: Any, **kwargs: Any) -> Any:
        programs.append(build_stage_program(*args, **kwargs))
        return programs[-1]

    with (
        counting as sent,
        mock.patch.object(reduce_scatter, "MOST_BYTES", limit),
        mock.patch.object(preparation, "build_stage_program", built),
    ):
        net.fit(data.batch(SAMPLES // smp.dp_size()), epochs=2, verbose=0)
    [program] = programs
    early = program.last[1].early if program.last is not None else None
    given = set(early.tensors if early is not None else ())
    return _found(net, made, sent) | {
        "in the last backward": bool(program.buckets)
        and all(
            given.issuperset(parts_of(program.split.outputs[i])) for bucket in program.buckets for i in bucket.positions
        ),
        "sizes": sorted(program.reduction.gradients.nbytes.values()) if program.reduction is not None else [],
    }


def logged() -> dict[str, Any]:
    """What callbacks are told by a `train_step` that returns gradients, and what the history holds of its loss."""
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
    net = OwnStepNet(clips=False)
    net.compile(tf_keras.optimizers.Adam(0.01), "mse")
    words = np.concatenate([batch(number) for number in range(3)])
    data = tf.data.Dataset.from_tensor_slices((words, np.ones([len(words), 2])))
    seen: list[dict[str, Any]] = []
    telling = tf_keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(dict(logs)))
    history = net.fit(data.batch(SAMPLES // smp.dp_size()), verbose=0, callbacks=[telling])
    return {"logs": seen, "loss": float(history.history["loss"][-1])}


def _found(net: Net, made: Any, sent: dict[str, int]) -> dict[str, Any]:
    known = slots(innermost(made), net.local_trainable_variables)
    variables = made.variables() if callable(made.variables) else made.variables
    return {
        "weights": {v.name: v.numpy() for v in net.local_trainable_variables},
        "slots": {v.name: s.shape.as_list() for v, name, s in known if name in ("m", "velocities", "momentums", "r")},
        "sent": sent,
        "rows": {v.name: layouts.slots_of(v, made).rows_at(layouts.here()) for v in net.local_trainable_variables},
        "bytes": sum(v.numpy().nbytes for v in variables if v.shape.rank),
    }

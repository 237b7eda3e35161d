"""Trainings whose optimizer averages over the replicas what it makes of their gradients."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.keras.optimizer_reports import slot_bytes_here
from smp_tf.replicas import one_bit_errors
from tests.distributed.cases.sharded_slots import Net, batch, stepped

LENGTH, BATCH = 32, 16
RATE = 3e-3


def optimizers(warmup: int) -> dict[str, Any]:
    """What a case names."""
    return {
        "adam": lambda: tf_keras.optimizers.Adam(RATE),
        "one-bit adam": lambda: smp.OneBitAdam(RATE, warmup_steps=warmup),
        "one-bit lamb": lambda: smp.OneBitLAMB(10 * RATE, warmup_steps=warmup),
        # Whose variance never freezes.
        "lamb": lambda: smp.OneBitLAMB(10 * RATE, warmup_steps=10**6),
    }


def language_model(names: list[str], steps: int, warmup: int) -> dict[str, Any]:
    """The model of examples/language_model.py, smaller, trained by several optimizers from the same weights on.

    Args:
        names: keys of `optimizers`.
        steps: in all.
        warmup: steps after which the weights are looked at, and an optimizer of one bit begins to compress.
    """
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    try:
        from language_model import GPT, batch_of, manual
    finally:
        del sys.path[0]
    numbers, characters = manual()
    model, own = GPT(len(characters), LENGTH, width=64, depth=1, heads=2), slice(smp.dp_rank(), None, smp.dp_size())

    @smp.step
    def forward_backward(tokens: tf.Tensor, following: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(following, model(tokens)))
        return tape.gradient(loss, model.trainable_variables), loss

    def trained(optimizer: Any) -> dict[str, Any]:
        @tf.function
        def train(tokens: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
            gradients, loss = forward_backward(tokens, following)
            gradients = [gradient.accumulate() for gradient in gradients]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss.reduce_mean()

        random, losses, warm = np.random.default_rng(1), [], {}
        # Optimizers of the cases before this one in these processes were once deleted only while this one trained.
        gc.collect()
        held = slot_bytes_here()
        with Sent() as sent:
            for step in range(steps):
                tokens, following = (tf.constant(part[own]) for part in batch_of(numbers, random, BATCH, LENGTH))
                losses.append(float(train(tokens, following)))
                if step == warmup - 1:
                    warm = weights_of(model)
        return {
            "losses": losses,
            "warm": warm,
            "weights": weights_of(model),
            "sent": sent.bytes,
            "iterations": int(optimizer.iterations),
            "held": slot_bytes_here() - held,
        }

    start, found, made = {}, {}, []
    smp.register_post_partition_hook(lambda: start.update(weights_of(model)))
    for name in names:
        for variable in model.local_trainable_variables if start else []:
            variable.assign(start[variable.name])
        made.append(optimizers(warmup)[name]())
        found[name] = trained(made[-1])
    stored = sum(value.nbytes for value in start.values())
    return {"trained": found, "stored": stored, "place": [smp.mp_rank(), smp.dp_rank()]}


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return {v.name: v.numpy() for v in model.local_trainable_variables}


class Sent:
    """The bytes of gradients and momenta that this rank gives to collectives, by these, while functions are traced."""

    def __init__(self) -> None:
        # By their names: a function may be traced more than once.
        self._of_name: dict[tuple[str, str], int] = {}
        self._patches = [self._counted(name) for name in ("alltoall", "allgather", "grouped_allreduce")]

    def __enter__(self) -> Sent:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()

    @property
    def bytes(self) -> dict[str, int]:
        """By the collective."""
        found: dict[str, int] = {}
        for (name, _), count in self._of_name.items():
            found[name] = found.get(name, 0) + count
        return found

    def _counted(self, name: str) -> Any:
        real = getattr(hvd, name)

        def count(given: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs["name"].startswith(("smp_gradients", "smp_one_bit")) and "_weight" not in kwargs["name"]:
                found = sum(t.shape.num_elements() * t.dtype.size for t in tf.nest.flatten(given))
                self._of_name[name, kwargs["name"]] = found
            return real(given, *args, **kwargs)

        return mock.patch.object(hvd, name, count)


#: Samples of each replica in each step, by the number of replicas; the first takes batches of one size, others of two.
SHARES = {
    2: [(4, 4), (4, 2), (4, 4), (4, 2), (4, 4)],
    3: [(4, 2, 2), (4, 1, 1), (4, 2, 2), (4, 1, 1), (4, 2, 2)],
}


class Table(smp.DistributedModel):
    """Gradients of the embedding are sparse."""

    def __init__(self) -> None:
        super().__init__(name="table")
        start = tf_keras.initializers.RandomNormal(seed=7)
        self.embedding = layers.Embedding(40, 6, embeddings_initializer=start)
        self.head = layers.Dense(3, kernel_initializer=start)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(self.embedding(x))


def shares(warmup: int) -> dict[str, Any]:
    """Five steps on shares of different sizes, in groups of a weight each, applied in a function; one process has all.

    Args:
        warmup: how many of them send gradients.
    """
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
    net, optimizer, warm = Table(), smp.OneBitAdam(0.01, warmup_steps=warmup), {}
    usual, one_bit_errors.MOST_BYTES = one_bit_errors.MOST_BYTES, 20

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - 1.0) ** 2)
        return tape.gradient(loss, net.trainable_variables)

    @tf.function
    def train(x: tf.Tensor) -> None:
        sums = [gradient.accumulate() for gradient in step(x)]
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))

    try:
        for number, sizes in enumerate(SHARES[max(2, smp.dp_size())]):
            whole = np.random.RandomState(number).randint(0, 40, (sum(sizes), 5))
            own = whole if smp.dp_size() == 1 else np.split(whole, np.cumsum(sizes))[smp.dp_rank()]
            train(tf.constant(own))
            if number == warmup - 1:
                warm = weights_of(net)
    finally:
        one_bit_errors.MOST_BYTES = usual
    return {"warm": warm, "weights": weights_of(net), "place": [smp.mp_rank(), smp.dp_rank()]}


def fitted(folder: str) -> dict[str, Any]:
    """Two epochs of `fit` with a checkpoint between them, and the second one once more after a restore.

    Args:
        folder: for checkpoints.
    """
    random = np.random.RandomState(0)
    x = random.standard_normal((64, 8)).astype(np.float32)
    y = x[:, :1] * 3.0 - x[:, 1:2]
    own = slice(smp.dp_rank(), None, smp.dp_size())
    net = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Dense(32, activation="tanh"), layers.Dense(1)]))
    # Of four batches in an epoch the last is after the warm-up.
    net.compile(optimizer=smp.OneBitAdam(0.01, warmup_steps=3), loss="mse")
    manager = smp.CheckpointManager(tf.train.Checkpoint(model=net, optimizer=net.optimizer), folder)

    def fit() -> float:
        return net.fit(x[own], y[own], batch_size=8, epochs=1, shuffle=False, verbose=0).history["loss"][0]

    losses = [fit()]
    manager.save()
    saved = weights_of(net)
    losses.append(fit())
    manager.restore()
    restored = weights_of(net)
    losses.append(fit())
    return {
        "losses": losses,
        "saved": saved,
        "restored": restored,
        "iterations": int(net.optimizer.iterations),
        "weights": weights_of(net),
        "place": [smp.mp_rank(), smp.dp_rank()],
    }


def refused() -> dict[str, str]:
    """What is said to those who would apply or average what a step has left to an optimizer of one bit."""
    net = Net()
    step, x = stepped(net), tf.constant(batch(0))
    local = [gradient.accumulate() for gradient in step(x)]
    given = [(g, v) for g, v in zip(local, net.trainable_variables, strict=True) if g is not None]

    def said(call: Any) -> str:
        try:
            call()
        except smp.errors.StepError as error:
            return str(error)
        return "nothing"

    scaled = tf_keras.mixed_precision.LossScaleOptimizer(smp.OneBitAdam())
    wrapped = smp.DistributedOptimizer(smp.OneBitAdam())
    twice = [(2.0 * g, v) for g, v in given]
    one_bit, (clipped, _) = smp.OneBitAdam(), smp.clip_by_global_norm(local, 0.1)
    return {
        "adam": said(lambda: tf_keras.optimizers.Adam().apply_gradients(given)),
        "legacy": said(lambda: tf_keras.optimizers.legacy.Adam().apply_gradients(twice)),
        "average": said(lambda: smp.average_gradients([g for g, _ in given])),
        "wrapped": said(lambda: wrapped.apply_gradients(given)),
        "scaled": said(lambda: scaled.apply_gradients(given)),
        "compiled": said(lambda: tf.function(lambda: one_bit.apply_gradients(given), jit_compile=True)()),
        # Eagerly, and clipped.
        "fine": said(lambda: one_bit.apply_gradients(zip(clipped, net.trainable_variables, strict=True))),
        "script": said(lambda: tf_keras.optimizers.SGD().apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])),
    }

"""Counts the messages of a step, as the transport saw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tf_keras import layers

import smp_tf as smp
from smp_tf.job import runtime
from smp_tf.ops.transport import MESSAGE_PROGRAM
from tests.distributed.models import MODELS, forward_backward

STEPS = 3
#: Steps until all has gone that goes once.
ONCE = 2


class Chain(smp.DistributedModel):
    """Dense layers one after the other; each also adds a constant, which costs no message."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [layers.Dense(16, activation="tanh") for _ in range(6)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.hidden:
            x = layer(x) + tf.range(16, dtype=tf.float32) / tf.cast(tf.shape(x)[1], tf.float32)
        return x


class Skip(smp.DistributedModel):
    """Placed by hand on three stages; what stage 0 makes is used twice on stage 2.

    first ──▶ second ──▶ third (+ first, + first squared)
    stage 0   stage 1    stage 2
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(16, activation="tanh")
        self.second = layers.Dense(8, activation="tanh")
        self.third = layers.Dense(16, activation="tanh")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        with smp.partition(0):
            x = self.first(x)
        with smp.partition(1):
            y = self.second(x)
        with smp.partition(2):
            return self.third(y) + x + x * x


class Tied(smp.DistributedModel):
    """Placed by hand on three stages, the first and the last of which use the same table.

    table ──▶ middle ──▶ table, transposed
    stage 0   stage 1    stage 2
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(19, 16)
        self.middle = layers.Dense(16, activation="tanh")

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        with smp.partition(0):
            x = self.table(tokens)
        with smp.partition(1):
            x = self.middle(x)
        with smp.partition(2):
            return tf.matmul(x, self.table.embeddings, transpose_b=True)


def sent() -> Counter[tuple[int, int, int]]:
    """Messages and bytes of steps sent so far, by (peer, edge, what), over all programs."""
    transport = runtime.current().transport
    assert transport is not None
    counts: Counter[tuple[int, int, int]] = Counter()
    for edge in transport.stats()["edges"]:
        if edge["direction"] == "sent" and edge["program"] != MESSAGE_PROGRAM:
            counts[edge["peer"], edge["program"], edge["edge"]] += edge["messages"]
            counts[edge["peer"], edge["program"], -1 - edge["edge"]] += edge["bytes"]
    return counts


def per_step(run: Callable[[], Any]) -> list[dict[str, int]]:
    """Runs steps and returns, for each edge that had messages, how many a step has and of what size."""
    for _ in range(ONCE):
        run()
    before = sent()
    for _ in range(STEPS):
        run()
    new = sent() - before
    edges = []
    for (peer, program, edge), count in sorted(new.items()):
        if edge >= 0:
            size = new[peer, program, -1 - edge] // count
            edges.append({"to": peer, "messages": count / STEPS, "bytes": size})
    return edges


def train_step(net: smp.DistributedModel) -> Callable[[tf.Tensor], tf.Tensor]:
    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(x) ** 2)
        return loss, tape.gradient(loss, net.trainable_variables)

    return step


def chain() -> dict[str, Any]:
    step = train_step(Chain())
    x = tf.constant(np.ones((16, 16), np.float32))
    return {"edges": per_step(lambda: step(x))}


def skip() -> dict[str, Any]:
    step = train_step(Skip())
    x = tf.constant(np.ones((16, 16), np.float32))
    return {"edges": per_step(lambda: step(x))}


def tied() -> dict[str, Any]:
    step = train_step(Tied())
    tokens = tf.constant(np.arange(16, dtype=np.int32))
    return {"edges": per_step(lambda: step(tokens))}


def tied_embedding() -> dict[str, Any]:
    entry = MODELS["gpt"]
    entry.prepare()
    net = entry.build(smp.DistributedModel)

    @smp.step
    def step(batch: Sequence[tf.Tensor]) -> Any:
        return forward_backward(entry, net, batch)

    batch = tuple(map(tf.constant, entry.batch(0)))
    return {"edges": per_step(lambda: step(batch))}

"""Losses and logs that are drawn at random are those of the whole batch, and so are the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given, settings
from hypothesis import strategies as st
from tf_keras import layers

import smp_tf as smp
from tests.full_only import params
from tests.smp_tf.whole_batch.drawn_numbers import FUNCTIONS, MASKS, TERMS, TOTALS, Number, logs, losses

pytestmark = pytest.mark.large

Computed = Callable[[Any, Any, Any], Any]


class Heads(smp.DistributedModel):
    """A layer for each of some losses, each with its own tape and optimizer; logs are of the first layer's outputs."""

    def __init__(self, losses: Sequence[Computed], logged: Sequence[Computed]) -> None:
        super().__init__(name="heads")
        self.heads = [layers.Dense(3) for _ in losses]
        self.by = [tf_keras.optimizers.SGD(1.0) for _ in losses]
        self.losses_of_heads = list(losses)
        self.logged = list(logged)

    def call(self, x: Any) -> Any:
        return [head(x) for head in self.heads]

    def train_step(self, data: Any) -> Any:
        x, y, w = data
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x, training=True)
            found = [loss(y, w, p) for loss, p in zip(self.losses_of_heads, outputs, strict=True)]
        for loss, head, optimizer in zip(found, self.heads, self.by, strict=True):
            weights = head.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        logged = {f"log {n}": log(y, w, outputs[0]) for n, log in enumerate(self.logged)}
        return {**{f"loss {n}": loss for n, loss in enumerate(found)}, **logged}


def compare(drawn: Sequence[Computed], logged: Sequence[Computed], samples: int, microbatches: int, seed: int) -> None:
    """Trains on a batch, and wants the losses, the logs and the gradients that TensorFlow finds for all of it."""
    random = np.random.RandomState(seed)
    x, y = random.randn(samples, 4), random.randn(samples, 3)
    w = np.where(random.rand(samples) < 0.3, 0.0, random.rand(samples))
    kernels = [0.5 * random.randn(4, 3) for _ in drawn]
    smp.shutdown()
    smp.init({"microbatches": microbatches, "seed": 1})
    try:
        model = Heads(drawn, logged)
        model.build((None, 4))
        for head, kernel in zip(model.heads, kernels, strict=True):
            head.kernel.assign(kernel)
        model.compile()
        found = model.train_on_batch(x, y, w, return_dict=True)
        after = [head.kernel.numpy() for head in model.heads]
    finally:
        smp.shutdown()
    for number, (loss, kernel) in enumerate(zip(drawn, kernels, strict=True)):
        weight = tf.Variable(kernel)
        with tf.GradientTape() as tape:
            wanted = loss(y, w, tf.matmul(x, weight))
        gradient = tape.gradient(wanted, weight)
        np.testing.assert_allclose(found[f"loss {number}"], wanted, rtol=1e-9, atol=1e-11, err_msg=str(loss))
        np.testing.assert_allclose(kernel - after[number], gradient, rtol=1e-9, atol=1e-11, err_msg=str(loss))
    for number, log in enumerate(logged):
        wanted = log(y, w, tf.matmul(x, kernels[0]))
        np.testing.assert_allclose(found[f"log {number}"], wanted, rtol=1e-9, atol=1e-11, err_msg=str(log))


def cycle(masks: Sequence[str]) -> tuple[list[Number], list[Number]]:
    """All totals of some masks: as losses, and as logs that are not linear. Terms and functions take turns."""
    pairs = list(itertools.product(masks, TOTALS))
    terms, functions = sorted(TERMS), sorted(FUNCTIONS)
    losses_of = [Number(terms[n % len(terms)], mask, total, -0.5) for n, (mask, total) in enumerate(pairs)]
    logs_of = [
        Number(terms[(n + 3) % len(terms)], mask, total, 1.0, (functions[n % len(functions)],))
        for n, (mask, total) in enumerate(pairs)
    ]
    return losses_of, logs_of


@pytest.mark.parametrize("mask", params(list(MASKS), [mask for mask in MASKS if mask != "all"]))
def test_every_total_of_a_mask_is_that_of_the_whole_batch(mask: str) -> None:
    """Microbatches of two sizes: the mask of all samples is then a constant of the batch, and none of a microbatch."""
    compare(*cycle([mask]), samples=7, microbatches=3, seed=0)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, int]:
    microbatches = draw(st.integers(2, 5))
    return draw(st.integers(microbatches, 11)), microbatches, draw(st.integers(0, 10**6))


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(
    drawn=st.lists(losses, min_size=1, max_size=6),
    logged=st.lists(logs, max_size=4),
    batch=batches(),
)
def test_drawn_losses_and_logs_are_those_of_the_whole_batch(
    drawn: Any, logged: Any, batch: tuple[int, int, int]
) -> None:
    compare(drawn, logged, *batch)

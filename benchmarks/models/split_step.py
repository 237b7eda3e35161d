"""A training step of a GPT that is split by smp_tf, as the benchmarks measure it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import smp_tf as smp  # isort: split

import tensorflow as tf

from models.gpt import Size, batch_of, build, forward_backward


def split_step(size: Size, optimizer: Any) -> Callable[..., Any]:
    """Returns a function that is a training step of a split model, and is not traced yet.

    Args:
        size: of the model and its batch.
        optimizer: applies the gradients.

    Returns:
        The function. It takes tokens and those that follow, and returns the mean loss.
    """
    model = build(smp.DistributedModel, size)

    @smp.step
    def step(tokens: tf.Tensor, following: tf.Tensor) -> Any:
        return forward_backward(model, tokens, following)

    @tf.function
    def train_step(tokens: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        gradients, loss = step(tokens, following)
        sums = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    return train_step


def own_batch(size: Size) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the tokens and those that follow, in another order of the samples on every replica.

    smp_tf reports equal batches on replicas as a mistake.

    Args:
        size: of the batch.
    """
    tokens, following = batch_of(size)
    return tf.roll(tokens, smp.dp_rank(), axis=0), tf.roll(following, smp.dp_rank(), axis=0)

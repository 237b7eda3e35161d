"""A training step of a model of the zoo, as a user's script has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import smp_tf as smp
from tests.distributed.models import ZooModel, forward_backward


def training_step(entry: ZooModel, model: Any, optimizer: Any) -> Callable[..., tf.Tensor]:
    """Forward, backward and optimizer on a batch; the function returns the batch's loss.

    Args:
        entry: the model's entry in the zoo.
        model: the distributed model.
        optimizer: applies the gradients.
    """

    @smp.step
    def step(batch: Sequence[tf.Tensor]) -> Any:
        return forward_backward(entry, model, batch)

    def train_step(*batch: tf.Tensor) -> tf.Tensor:
        loss, gradients = step(batch)
        sums = [g if g is None else g.accumulate() for g in gradients]
        optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    return train_step

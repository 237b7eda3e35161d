"""Trainings whose gradients, and slots, are in the host's memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

import smp_tf as smp
from tests.distributed.cases.sent_bytes import counted
from tests.distributed.cases.sharded_slots import Net, batch


def gradients_of(net: Net) -> Any:
    """What a step returns on this replica's part of a batch."""

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - 1.0) ** 2)
        return tape.gradient(loss, net.trainable_variables)

    return step(tf.constant(batch(0)))


def sent() -> dict[str, Any]:
    """The bytes that this rank gives to the collectives of a step, of layers of very different sizes."""
    with counted() as found:
        gradients = gradients_of(Net((201, 1, 97)))
    sums = [total for gradient in gradients if (total := gradient.accumulate()) is not None]
    return {"sent": found, "gradients": sum(4 * int(tf.size(total)) for total in sums)}


def legacy() -> str:
    """What an optimizer is told that cannot have its slots on the host."""
    net, optimizer = Net(), tf_keras.optimizers.legacy.Adam(0.01)
    sums = [gradient.accumulate() for gradient in gradients_of(net)]
    try:
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    except smp.errors.StepError as error:
        return str(error)
    return "nothing"

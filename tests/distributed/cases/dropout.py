"""The masks that dropout layers draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_keras import layers

import smp_tf as smp


class Masks(smp.DistributedModel):
    """Three stages' worth of layers that pass ones through unchanged, but for dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = [
            (layers.Dense(6, kernel_initializer="identity", trainable=False), layers.Dropout(0.5)) for _ in range(4)
        ]

    def call(self, x: tf.Tensor) -> list[tf.Tensor]:
        masks = []
        for dense, dropout in self.pairs:
            kept = dropout(tf.ones_like(dense(x)), training=True)
            masks.append(kept)
            x = dense(x) + 0.0 * kept
        return masks


def masks() -> dict[str, Any]:
    """Two steps; returns masks by step, layer and microbatch."""
    net = Masks()

    @smp.step
    def step(x: tf.Tensor) -> Any:
        return net(x)

    x = tf.constant(np.ones((8, 6), np.float32))
    told = [[[value.numpy() for value in mask.outputs] for mask in step(x)] for _ in range(2)]
    return {"masks": np.array(told), "replica": smp.dp_rank()}

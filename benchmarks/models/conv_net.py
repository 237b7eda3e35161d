"""A convolutional net to measure: residual blocks with batch normalisation, of one width, on small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tf_keras import layers

#: Whether the loss depends on how a batch is cut. Here means and variances are those of a microbatch.
MIXES_SAMPLES = True


@dataclass(frozen=True)
class Size:
    """How large the net is, and what it is fed.

    Attributes:
        depth: number of blocks, of two convolutions each.
        width: number of channels.
        pixels: pixels of an image's side.
        classes: number of classes to tell apart.
        batch: images of a batch.
    """

    depth: int
    width: int
    pixels: int
    classes: int
    batch: int

    @property
    def items(self) -> int:
        """Images of a batch."""
        return self.batch


SIZES = {
    "conv-tiny": Size(depth=2, width=4, pixels=8, classes=4, batch=8),
    "conv": Size(depth=6, width=64, pixels=32, classes=10, batch=32),
}


class Block(layers.Layer):
    """Two convolutions next to a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = [layers.Conv2D(width, 3, padding="same", use_bias=False) for _ in range(2)]
        self.norms = [layers.BatchNormalization() for _ in range(2)]

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Returns what the block makes of images."""
        y = tf.nn.relu(self.norms[0](self.convolutions[0](x), training=training))
        return tf.nn.relu(x + self.norms[1](self.convolutions[1](y), training=training))


def build(base: type, size: Size) -> Any:
    """Returns a net, a subclass of `tf_keras.Model` or of `smp.DistributedModel`."""

    class ConvNet(base):
        def __init__(self) -> None:
            super().__init__()
            self.stem = layers.Conv2D(size.width, 3, padding="same")
            self.blocks = [Block(size.width) for _ in range(size.depth)]
            self.pool = layers.GlobalAveragePooling2D()
            self.head = layers.Dense(size.classes)

        def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
            x = self.stem(images)
            for block in self.blocks:
                x = block(x, training=training)
            return self.head(self.pool(x))

    return ConvNet()


def forward_backward(model: Any, images: tf.Tensor, labels: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the gradients and the mean loss of a (micro)batch."""
    with tf.GradientTape() as tape:
        logits = tf.cast(model(images, training=True), tf.float32)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return tape.gradient(loss, model.trainable_variables), loss


def batch_of(size: Size) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns random images, float32[batch, pixels, pixels, 3], and their classes."""
    random = np.random.default_rng(1)
    images = random.normal(size=(size.batch, size.pixels, size.pixels, 3)).astype(np.float32)
    return tf.constant(images), tf.constant(random.integers(0, size.classes, size.batch))

"""A GPT to measure, in several sizes. Its output layer is its token embedding or a layer of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

from models.sizes import changed

#: Whether the loss depends on how a batch is cut.
MIXES_SAMPLES = False


@dataclass(frozen=True)
class Size:
    """How large a GPT is, and what it is fed.

    Attributes:
        depth: number of blocks.
        width: numbers per token.
        heads: attention heads; they divide the width.
        length: tokens of a sequence.
        vocabulary: number of different tokens.
        batch: sequences of a batch.
        tied: 1 if the token embedding is also the output layer, 0 if the output layer is one of its own.
    """

    depth: int
    width: int
    heads: int
    length: int
    vocabulary: int
    batch: int
    tied: int = 1

    @property
    def items(self) -> int:
        """Tokens of a batch."""
        return self.batch * self.length


SIZES = {
    "tiny": Size(depth=2, width=16, heads=2, length=8, vocabulary=32, batch=8),
    "small": Size(depth=4, width=128, heads=4, length=64, vocabulary=1000, batch=32),
    "medium": Size(depth=6, width=256, heads=8, length=128, vocabulary=4000, batch=32),
    "large": Size(depth=8, width=512, heads=8, length=128, vocabulary=8000, batch=32),
}


def size_of(name: str) -> Size:
    """Returns a size by its name, or a size that differs from it, as `sizes.changed` takes it."""
    return changed(name, SIZES)


class Block(layers.Layer):
    """Causal attention, then a small network at each position."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(size.heads, size.width // size.heads)
        self.norm2 = layers.LayerNormalization()
        self.wide = layers.Dense(4 * size.width, activation="gelu")
        self.narrow = layers.Dense(size.width)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Returns what the block makes of a sequence."""
        y = self.norm1(x)
        x += self.attention(y, y, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norm2(x)))


def build(base: type, size: Size) -> Any:
    """Returns a GPT, a subclass of `tf_keras.Model` or of `smp.DistributedModel`."""

    class GPT(base):
        def __init__(self) -> None:
            super().__init__()
            small = tf_keras.initializers.RandomNormal(stddev=0.05)
            self.tokens = layers.Embedding(size.vocabulary, size.width, embeddings_initializer=small)
            self.positions = layers.Embedding(size.length, size.width)
            self.blocks = [Block(size) for _ in range(size.depth)]
            self.norm = layers.LayerNormalization()
            if not size.tied:
                self.out = layers.Dense(size.vocabulary, use_bias=False, kernel_initializer=small)

        def call(self, tokens: tf.Tensor) -> tf.Tensor:
            x = self.tokens(tokens) + self.positions(tf.range(size.length))
            for block in self.blocks:
                x = block(x)
            if not size.tied:
                return self.out(self.norm(x))
            x = self.norm(x)
            return tf.matmul(x, tf.cast(self.tokens.embeddings, x.dtype), transpose_b=True)

    return GPT()


def forward_backward(model: Any, tokens: tf.Tensor, following: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the gradients and the mean loss of a (micro)batch."""
    with tf.GradientTape() as tape:
        logits = tf.cast(model(tokens), tf.float32)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(following, logits)
        loss = tf.reduce_mean(each)
    gradients = tape.gradient(loss, model.trainable_variables)
    return [tf.convert_to_tensor(gradient) for gradient in gradients], loss


def batch_of(size: Size) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns random tokens, int32[batch, length], and the tokens that follow them."""
    windows = np.random.default_rng(1).integers(0, size.vocabulary, (size.batch, size.length + 1), np.int32)
    return tf.constant(windows[:, :-1]), tf.constant(windows[:, 1:])

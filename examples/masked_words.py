"""Trains a masked language model by fit, with a masked loss and accuracy as scripts write them.

    horovodrun -np 2 python examples/masked_words.py     # the model on two processes
    python examples/masked_words.py                      # in one process, the same losses

A seventh of the letters of Python's help() is hidden, and the model is to say which they were. How many there are in a
microbatch differs. The loss divides by how many there are in the whole batch, as in one process.
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from language_model import batch_of, manual
from tensorflow.keras import layers

#: Stands for a letter that is not asked for.
NOT_ASKED = -1


class Positions(layers.Layer):
    """Adds to each letter what stands for its position."""

    def build(self, shape):
        """Makes the table of positions."""
        self.table = self.add_weight(name="table", shape=shape[1:], initializer="uniform")

    def call(self, x):
        """Returns the sum."""
        return x + self.table


def build(letters, length, width, depth):
    """Returns an encoder of letters. One letter more stands for what is hidden."""
    hidden_letter = tf.keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(letters + 1, width)(hidden_letter))
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(y, y)])
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))])
    return tf.keras.Model(hidden_letter, layers.Dense(letters)(layers.LayerNormalization()(x)), name="masked")


def masked_loss(labels, scores):
    """Returns the mean loss of the letters that are asked for."""
    is_asked = tf.cast(labels != NOT_ASKED, scores.dtype)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), scores)
    return tf.reduce_sum(each * is_asked) / tf.reduce_sum(is_asked)


def masked_accuracy(labels, scores):
    """Returns the share of the letters asked for that are said."""
    is_asked = tf.cast(labels != NOT_ASKED, scores.dtype)
    is_right = tf.cast(tf.argmax(scores, -1) == tf.cast(labels, tf.int64), scores.dtype)
    return tf.reduce_sum(is_right * is_asked) / tf.reduce_sum(is_asked)


def main():
    """Trains, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="batches of an epoch")
    parser.add_argument("--length", type=int, default=32, help="letters seen at a time")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2, help="number of blocks")
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1})
    numbers, characters = manual()
    random = np.random.default_rng(1)
    texts, _ = batch_of(numbers, random, 32 * args.steps, args.length)
    is_hidden = random.random(texts.shape) < 1 / 7
    seen = np.where(is_hidden, len(characters), texts).astype("int32")
    labels = np.where(is_hidden, texts, NOT_ASKED).astype("int32")

    model = smp.DistributedModel(lambda: build(len(characters), args.length, args.width, args.depth))
    model.compile(tf.keras.optimizers.Adam(3e-3), masked_loss, metrics=[masked_accuracy])
    history = model.fit(seen, labels, batch_size=32, epochs=args.epochs, verbose=0).history
    if smp.rank() == 0:
        for epoch, (loss, share) in enumerate(zip(*(history[k] for k in ("loss", "masked_accuracy")), strict=True), 1):
            print(f"epoch {epoch:2d}: mean loss {loss:.4f}, letters said {share:.4f}")


if __name__ == "__main__":
    main()

"""Trains a small GPT, split over processes, to write like the Python manual, letter by letter.

    horovodrun -np 2 python examples/language_model.py

The text is that of Python's help(), from `pydoc_data.topics`. The output layer is the token embedding itself. The first
and the last stage share this weight.
"""

import argparse
from pydoc_data.topics import topics

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tensorflow.keras import layers


class Block(layers.Layer):
    """Attention to what came before, then a small network at each position."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.norm2 = layers.LayerNormalization()
        self.wide = layers.Dense(4 * width, activation="gelu")
        self.narrow = layers.Dense(width)

    def call(self, x):
        """Returns what the block makes of a sequence."""
        y = self.norm1(x)
        x += self.attention(y, y, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norm2(x)))


class GPT(smp.DistributedModel):
    """Embeddings, blocks, and the token embedding once more as output layer."""

    def __init__(self, vocabulary, length, width, depth, heads):
        super().__init__()
        small = tf.keras.initializers.RandomNormal(stddev=0.05)
        self.tokens = layers.Embedding(vocabulary, width, embeddings_initializer=small)
        self.positions = layers.Embedding(length, width)
        self.blocks = [Block(width, heads) for _ in range(depth)]
        self.norm = layers.LayerNormalization()

    def call(self, tokens):
        """Returns one score per character that may follow."""
        x = self.tokens(tokens) + self.positions(tf.range(tf.shape(tokens)[1]))
        for block in self.blocks:
            x = block(x)
        return tf.matmul(self.norm(x), self.tokens.embeddings, transpose_b=True)


def manual():
    """Returns the text as numbers, one per character, and the characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    characters, numbers = np.unique(list(text), return_inverse=True)
    return numbers.astype("int32"), characters


def unigram_entropy(numbers):
    """Returns the loss, in nats, of the best guess that looks at no other character."""
    share = np.bincount(numbers) / len(numbers)
    return float(-np.sum(share * np.log(share)))


def batch_of(numbers, random, size, length):
    """Returns random windows of the text, and the same windows one character on."""
    starts = random.integers(0, len(numbers) - length - 1, size)
    windows = np.stack([numbers[start : start + length + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def main():
    """Trains, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="characters seen at a time")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1})
    tf.keras.utils.set_random_seed(1)

    numbers, characters = manual()
    entropy = unigram_entropy(numbers)
    model = GPT(len(characters), args.length, args.width, args.depth, args.heads)
    optimizer = tf.keras.optimizers.Adam(3e-3)

    @smp.step
    def forward_backward(tokens, following):
        with tf.GradientTape() as tape:
            logits = model(tokens)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(following, logits))
        return tape.gradient(loss, model.trainable_variables), loss

    @tf.function
    def train_step(tokens, following):
        gradients, loss = forward_backward(tokens, following)
        gradients = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    random = np.random.default_rng(1)  # the same on every rank: all see the same batches
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        console=Console(quiet=smp.rank() != 0),
    )
    losses = []
    with progress:
        bar = progress.add_task("", total=args.steps, loss="planning ...")
        for step in range(1, args.steps + 1):
            tokens, following = batch_of(numbers, random, args.batch_size, args.length)
            losses.append(float(train_step(tf.constant(tokens), tf.constant(following))))
            progress.update(bar, advance=1, loss=f"loss {losses[-1]:.3f} (unigrams: {entropy:.3f})")
            if step % 50 == 0:
                progress.console.print(f"step {step:4d}: loss {np.mean(losses[-50:]):.3f}")
    if smp.rank() == 0:
        print(
            f"loss {np.mean(losses[-20:]):.3f} nats per character after {args.steps} steps; "
            f"unigram entropy of the text {entropy:.3f}"
        )


if __name__ == "__main__":
    main()

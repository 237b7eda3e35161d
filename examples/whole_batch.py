"""Trains a network to tell eights from other digits, by a loss and a score that are none of single samples.

    horovodrun -np 2 python examples/whole_batch.py        # two stages, four microbatches
    horovodrun -np 2 python examples/whole_batch.py --partitions 1    # two replicas, each with half of every batch
    python examples/whole_batch.py --microbatches 1        # one process, the batch in one piece: the same numbers

One digit in ten is an eight. So the loss averages eights and others apart, gradients are clipped by the norm of all of
them, and an F1 score says how good it is. Of a microbatch these would be other numbers, and no numbers at all where it
has no eight. With whole_batch=True they are those of the batch.
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.keras import layers


class Net(smp.DistributedModel):
    """Three dense layers."""

    def __init__(self):
        super().__init__()
        self.hidden = [layers.Dense(64, activation="relu"), layers.Dense(64, activation="relu")]
        self.head = layers.Dense(1)

    def call(self, images, training=False):
        """Returns one score per image: above zero for an eight."""
        for layer in self.hidden:
            images = layer(images)
        return self.head(images)[:, 0]


def balanced(is_eight, scores):
    """Returns the loss: the mean over eights and the mean over others count alike."""
    each = tf.nn.sigmoid_cross_entropy_with_logits(is_eight, scores)
    # The last batch is small, and may have no eight.
    of_eights = tf.reduce_sum(each * is_eight) / tf.maximum(tf.reduce_sum(is_eight), 1)
    of_others = tf.reduce_sum(each * (1 - is_eight)) / tf.reduce_sum(1 - is_eight)
    return (of_eights + of_others) / 2


def f1_of(is_eight, scores):
    """Returns the F1 score."""
    found = tf.cast(scores > 0, tf.float32)
    return 2 * tf.reduce_sum(found * is_eight) / tf.maximum(tf.reduce_sum(found) + tf.reduce_sum(is_eight), 1)


def main():
    """Trains, and prints the means of every epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    tf.keras.utils.set_random_seed(1)
    model, optimizer = Net(), tf.keras.optimizers.SGD(0.2, momentum=0.9)

    @smp.step(whole_batch=True)  # every result, and every loss, is that of the whole batch
    def forward_backward(images, is_eight):
        with tf.GradientTape() as tape:
            scores = model(images, training=True)
            loss = balanced(is_eight, scores)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.2)
        return gradients, {"loss": loss, "norm": norm, "F1": f1_of(is_eight, scores)}

    @tf.function
    def train_step(images, is_eight):
        gradients, logs = forward_backward(images, is_eight)
        gradients = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {name: log.reduce_mean() for name, log in logs.items()}

    images, labels = load_digits(return_X_y=True)
    data = (images / 16).astype("float32"), (labels == 8).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices(data).shuffle(len(labels), seed=1).batch(args.batch_size)
    batches = smp.shard_dataset(batches)  # with replicas, the part of each batch that is this replica's
    for epoch in range(args.epochs):
        seen = [train_step(*batch) for batch in batches]
        means = {name: np.mean([float(logs[name]) for logs in seen]) for name in seen[0]}
        if smp.rank() == 0:
            print(f"epoch {epoch + 1}: " + ", ".join(f"{name} {mean:.4f}" for name, mean in means.items()))


if __name__ == "__main__":
    main()

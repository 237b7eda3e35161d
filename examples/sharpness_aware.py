"""Trains with sharpness-aware steps (SAM): gradients are taken where the loss is highest nearby.

    horovodrun -np 2 python examples/sharpness_aware.py     # the model on two processes
    python examples/sharpness_aware.py                      # in one process, the same losses

A batch runs twice through the same step. Between the two, every rank moves its own weights along their gradients, by a
length that is measured over the gradients of all ranks. After the second it moves them back. A `train_step` cannot do
this, since weights do not change within a step.
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow.keras import layers


def build():
    """Returns an ordinary Keras model."""
    return tf.keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(128, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ],
        name="digits",
    )


def main():
    """Trains, prints the losses, and tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--radius", type=float, default=0.05, help="how far weights are moved; 0 for ordinary steps")
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.5, random_state=0, stratify=labels
    )
    model = smp.DistributedModel(build)
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)

    @smp.step
    def forward_backward(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables), loss

    @smp.step
    def forward(x):
        return model(x, training=False)

    def move(moves):
        """Adds to the weights that this rank stores."""
        for weight, by in zip(model.trainable_variables, moves, strict=True):
            if by is not None:
                weight.assign_add(by)

    def train_on(x, y):
        gradients, loss = forward_backward(x, y)
        gradients = [gradient.accumulate() for gradient in gradients]  # None for the weights of other ranks
        scale = args.radius / (smp.global_norm(gradients) + 1e-12)
        moves = [None if gradient is None else scale * gradient for gradient in gradients]
        move(moves)
        gradients, _ = forward_backward(x, y)
        gradients = [gradient.accumulate() for gradient in gradients]
        move([None if by is None else -by for by in moves])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return float(loss.reduce_mean())

    batches = tf.data.Dataset.from_tensor_slices((train, train_labels)).shuffle(2000, seed=1).batch(64)
    for epoch in range(1, args.epochs + 1):
        losses = [train_on(x, y) for x, y in batches]
        if smp.rank() == 0:
            print(f"epoch {epoch:2d}: mean loss {np.mean(losses):.4f}")
    accuracy = np.mean(forward(test).concat().numpy().argmax(-1) == test_labels)
    if smp.rank() == 0:
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

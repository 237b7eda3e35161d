"""Trains a convolutional network, split over processes, on scikit-learn's handwritten digits.

    horovodrun -np 2 python examples/digits.py     # two halves of the model on two processes
    python examples/digits.py                      # the same model in one process, the same losses
    python examples/load_digits.py                 # loads what was saved, without smp_tf

The parts that make it a split model are marked with (1) to (5). The rest is an ordinary Keras script.
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow.keras import layers


class Net(smp.DistributedModel):  # (2) instead of tf.keras.Model
    """Two convolutions and two dense layers."""

    def __init__(self):
        super().__init__()
        # A bias before a batch normalisation would do nothing.
        self.conv1 = layers.Conv2D(32, 3, padding="same", use_bias=False)
        self.norm1 = layers.BatchNormalization()
        self.conv2 = layers.Conv2D(64, 3, padding="same", use_bias=False)
        self.norm2 = layers.BatchNormalization()
        self.pool = layers.MaxPool2D()
        self.flatten = layers.Flatten()
        self.drop = layers.Dropout(0.4)
        self.hidden = layers.Dense(128, activation="relu")
        self.head = layers.Dense(10)

    def call(self, images, training=False):
        """Returns one score per digit."""
        x = tf.nn.relu(self.norm1(self.conv1(images), training=training))
        x = tf.nn.relu(self.norm2(self.conv2(x), training=training))
        x = self.drop(self.flatten(self.pool(x)), training=training)
        return self.head(self.hidden(x))


def digits():
    """Returns 1,797 images of 8 x 8 pixels: four fifths to train on, one fifth to test."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
    labels = labels.astype("int32")
    return train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)


def main():
    """Trains, tests and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    parser.add_argument("--save", default="digits_model", help="folder for the trained model")
    args = parser.parse_args()

    # (1) This comes first. The seed fixes the weights and the dropout masks. One thread per operation fixes the order
    # of its sums. So any number of partitions gives the same losses.
    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": args.microbatches,
            "pipeline": "interleaved",
            "seed": 1,
            "intra_op_threads": 1,
        }
    )
    tf.keras.utils.set_random_seed(1)

    train_images, test_images, train_labels, test_labels = digits()
    model = Net()
    optimizer = tf.keras.optimizers.Adam(2e-3)

    @smp.step  # (3) one microbatch, forward and backward: this is what is cut and pipelined
    def forward_backward(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        return tape.gradient(loss, model.trainable_variables), loss

    @smp.step
    def forward(images):
        return model(images, training=False)

    @tf.function
    def train_step(images, labels):
        gradients, loss = forward_backward(images, labels)
        # (4) A step returns one value per microbatch. Say how to combine them.
        gradients = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    @tf.function
    def predict(images):
        return tf.argmax(forward(images).concat(), axis=1)

    # Every rank sees the same batches in the same order, since all ranks work on each batch together.
    batches = (
        tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        .shuffle(len(train_images), seed=1)
        .batch(args.batch_size, drop_remainder=True)
    )
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        console=Console(quiet=smp.rank() != 0),
    )
    with progress:
        bar = progress.add_task("", total=args.epochs * len(batches), loss="planning ...")
        for epoch in range(args.epochs):
            losses = []
            for images, labels in batches:
                losses.append(float(train_step(images, labels)))
                progress.update(bar, advance=1, loss=f"loss {losses[-1]:.4f}")
            progress.console.print(f"epoch {epoch + 1:2d}: mean loss {np.mean(losses):.4f}")

    accuracy = np.mean(predict(test_images).numpy() == test_labels)
    model.save_model(args.save)  # (5) the whole model, on all ranks; any Keras can load it
    if smp.rank() == 0:
        print(f"test accuracy {accuracy:.4f}, model saved in {args.save}")


if __name__ == "__main__":
    main()

"""Learns what digits look like without their labels (as SimCLR does), by fit: each image is compared with its batch.

    horovodrun -np 2 python examples/contrastive.py     # the model on two processes
    python examples/contrastive.py                      # in one process, the same losses but for rounding

Two views of every image of scikit-learn's handwritten digits go through the model. Among all views of the batch each is
to find the other one of its image. So the loss needs all of the batch, not a microbatch: the model runs forward on all
of it first, then the loss is computed once, and then the pipelined step takes gradients by it.
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from tensorflow.keras import layers


class Encoder(smp.DistributedModel):
    """A convolutional network, and a head that only the training needs."""

    def __init__(self):
        super().__init__(name="encoder")
        self.network = tf.keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(64),
            ]
        )
        self.head = tf.keras.Sequential([layers.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(32)])
        self.mean = tf.keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        """The metrics that begin anew with each epoch."""
        return [self.mean]

    def call(self, images):
        """Returns what images look like."""
        return self.network(images)

    def train_step(self, views):
        """Learns from two views of a batch."""
        one, other = views
        with tf.GradientTape() as tape:
            first, second = (self.head(self(view, training=True)) for view in (one, other))
            loss = compared(first, second)
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


def compared(first, second, temperature=0.2):
    """Returns how hard it is to find for each view the other one of its image, among all views of the batch."""
    views = tf.math.l2_normalize(tf.concat([first, second], 0), -1)
    count = tf.shape(first)[0]
    scores = tf.matmul(views, views, transpose_b=True) / temperature
    scores -= 1e9 * tf.eye(2 * count)  # no view is its own other one
    others = tf.concat([tf.range(count) + count, tf.range(count)], 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(others, scores))


def view_of(images, random):
    """Returns images that are moved by up to one pixel, and have some noise."""
    moved = np.stack([np.roll(image, random.integers(-1, 2, 2), (0, 1)) for image in images])
    return (moved + 0.1 * random.standard_normal(moved.shape)).astype("float32")


def main():
    """Trains, prints the losses, and tells digits by their nearest neighbours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
    random = np.random.default_rng(1)  # the same on every rank: all make the same views
    model = Encoder()
    model.compile(tf.keras.optimizers.Adam(2e-3))
    for epoch in range(1, args.epochs + 1):
        views = view_of(images, random), view_of(images, random)
        history = model.fit(*views, batch_size=128, epochs=1, verbose=0).history
        if smp.rank() == 0:
            print(f"epoch {epoch:2d}: mean loss {history['loss'][0]:.4f}")
    seen = model.predict(images, batch_size=128, verbose=0)
    if smp.rank() == 0:
        told = KNeighborsClassifier(5).fit(seen[:900], labels[:900]).score(seen[900:], labels[900:])
        print(f"test accuracy {told:.4f} by the nearest of 900 images with labels")


if __name__ == "__main__":
    main()

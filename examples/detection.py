"""Trains a small detector by fit: its losses are divided by how many things there are to be found.

    horovodrun -np 2 python examples/detection.py     # the model on two processes
    python examples/detection.py                      # in one process, the same losses

Handwritten digits of scikit-learn lie on sheets of 32 x 32, up to three on a sheet. For each of 8 x 8 cells the model
says whether the middle of a digit is there, and where in the cell. A microbatch may have sheets without any digit. What
its samples count comes from the whole batch, so nothing is divided by zero.
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.keras import layers


def sheets(count, random):
    """Returns sheets with digits on them, which cells have one, and where in its cell its middle is."""
    digits = load_digits().images / 16
    images, what = np.zeros((count, 32, 32, 1), "float32"), np.zeros((count, 8, 8, 1), "float32")
    where = np.zeros((count, 8, 8, 2), "float32")
    for sheet in range(count):
        for _ in range(random.integers(0, 4)):
            top, left = random.integers(0, 25, 2)
            place = images[sheet, top : top + 8, left : left + 8, 0]
            place[:] = np.maximum(place, digits[random.integers(len(digits))])
            row, column = (top + 4) // 4, (left + 4) // 4
            what[sheet, row, column] = 1
            where[sheet, row, column] = (top % 4) / 4, (left % 4) / 4
    return images, {"what": what, "where": np.concatenate([what, where], -1)}


def build():
    """Returns a convolutional network with two heads."""
    image = tf.keras.Input((32, 32, 1))
    x = layers.Conv2D(16, 5, padding="same", activation="relu")(image)
    x = layers.Conv2D(32, 3, 2, padding="same", activation="relu")(x)
    x = layers.Conv2D(48, 3, 2, padding="same", activation="relu")(x)
    x = layers.Conv2D(48, 3, padding="same", activation="relu")(x)
    heads = {
        "what": layers.Conv2D(1, 1, bias_initializer=tf.keras.initializers.Constant(-3.0), name="what")(x),
        "where": layers.Conv2D(2, 1, name="where")(x),
    }
    return tf.keras.Model(image, heads, name="detector")


def focal(labels, scores):
    """Returns the focal loss of all cells, divided by the number of digits."""
    each = tf.nn.sigmoid_cross_entropy_with_logits(labels, scores)
    off = tf.abs(labels - tf.sigmoid(scores))
    return tf.reduce_sum(tf.square(off) * each) / tf.maximum(1.0, tf.reduce_sum(labels))


def distance(labels, places):
    """Returns how far off the places of digits are, on average over the digits."""
    is_digit, wanted = labels[..., :1], labels[..., 1:]
    return tf.reduce_sum(is_digit * tf.abs(wanted - places)) / tf.maximum(1.0, tf.reduce_sum(is_digit))


def f1(labels, scores):
    """Returns the F1 score of a batch."""
    said = tf.cast(scores > 0, labels.dtype)
    return 2 * tf.reduce_sum(labels * said) / tf.maximum(1.0, tf.reduce_sum(labels) + tf.reduce_sum(said))


def main():
    """Trains, prints the losses, and tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--sheets", type=int, default=1024, help="that are trained on")
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    random = np.random.default_rng(1)
    images, labels = sheets(args.sheets, random)
    test_images, test_labels = sheets(256, random)

    model = smp.DistributedModel(build)
    model.compile(
        tf.keras.optimizers.Adam(3e-3),
        loss={"what": focal, "where": distance},
        loss_weights={"where": 0.5},
        metrics={"what": f1},
    )
    history = model.fit(images, labels, batch_size=32, epochs=args.epochs, verbose=0).history
    found = model.evaluate(test_images, test_labels, batch_size=64, verbose=0, return_dict=True)
    if smp.rank() == 0:
        for epoch, loss in enumerate(history["loss"], start=1):
            print(f"epoch {epoch:2d}: mean loss {loss:.4f}")
        print(f"test: F1 {found['what_f1']:.4f}, places off by {4 * found['where_loss']:.4f} pixels")


if __name__ == "__main__":
    main()

"""Trains a split model with Keras's own `compile` and `fit`. Callbacks, validation and progress are as in one process.

    horovodrun -np 2 python examples/fit.py     # the model on two processes
    python examples/fit.py                      # in one process, the same losses

The data are scikit-learn's handwritten digits. Besides Keras's usual `fit` there are three things: `smp.init`,
`smp.DistributedModel` around the function that builds the model, and callbacks of `smp.callbacks`.
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow.keras import layers


def build():
    """Returns an ordinary Keras model."""
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ],
        name="digits",
    )


def main():
    """Trains, tests and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    parser.add_argument("--csv", default="digits_log.csv", help="file for the losses of every epoch")
    parser.add_argument("--plan", default=None, help="file that the placement of the layers is written to")
    parser.add_argument("--checkpoints", default=None, help="folder in which an interrupted training goes on")
    args = parser.parse_args()

    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": args.microbatches,
            "partition_file": args.plan,
            "seed": 1,
            "intra_op_threads": 1,
        }
    )
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )

    model = smp.DistributedModel(build)
    model.compile(
        optimizer=tf.keras.optimizers.Adam(2e-3),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        tf.keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        tf.keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5),
        tf.keras.callbacks.CSVLogger(args.csv),
        smp.callbacks.PipelineSummary(),
    ]
    if args.checkpoints:
        callbacks.append(smp.callbacks.Checkpoint(args.checkpoints, max_to_keep=2))
    model.fit(
        train, train_labels, batch_size=64, epochs=args.epochs, validation_split=0.1, callbacks=callbacks, verbose=2
    )
    model.summary()
    loss, accuracy = model.evaluate(test, test_labels, batch_size=120, verbose=0)
    right = (model.predict(test, batch_size=120, verbose=0).argmax(-1) == test_labels).mean()
    if smp.rank() == 0:
        print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}, the same by predict {right:.4f}")


if __name__ == "__main__":
    main()

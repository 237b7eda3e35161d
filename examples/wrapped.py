"""Splits an ordinary functional Keras model, without a change to it, and saves it as a file of Keras's.

    horovodrun -np 2 python examples/wrapped.py     # the model on two processes
    python examples/wrapped.py                      # in one process, the same losses

The data are scikit-learn's: 569 tumours, each with three groups of measurements (means, errors, worst values). The
model tells benign from malignant ones. The parts that make it a split model are marked with (1) to (3).
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from tensorflow.keras import layers

GROUPS = ("mean", "error", "worst")


def build():
    """Returns an ordinary Keras model with a branch for each group of measurements, and layers that join them."""
    inputs = [layers.Input((10,), name=name) for name in GROUPS]
    branches = []
    for name, group in zip(GROUPS, inputs, strict=True):
        x = layers.Dense(32, activation="relu", name=f"{name}_1")(group)
        branches.append(layers.Dense(16, activation="relu", name=f"{name}_2")(x))
    x = layers.Concatenate()(branches)
    x = layers.Dropout(0.3)(layers.Dense(32, activation="relu", name="together")(x))
    return tf.keras.Model(inputs, layers.Dense(1, name="malignant")(x), name="tumours")


def tumours():
    """Returns the three groups of measurements, and what each tumour turned out to be. A quarter is for testing."""
    measured, benign = load_breast_cancer(return_X_y=True)
    malignant = (benign == 0).astype("float32")[:, None]
    train, test, train_labels, test_labels = train_test_split(
        measured, malignant, test_size=0.25, random_state=0, stratify=malignant
    )
    scaler = StandardScaler().fit(train)
    train, test = (scaler.transform(part).astype("float32") for part in (train, test))
    return np.split(train, 3, axis=1), train_labels, np.split(test, 3, axis=1), test_labels


def main():
    """Trains, tests and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=2, help="parts a batch is cut into")
    parser.add_argument("--save", default="tumours.keras", help="file for the trained model")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    train, train_labels, test, test_labels = tumours()

    # (1) Give the function that builds the model, not the model. So no process ever holds all of its weights.
    model = smp.DistributedModel(build)
    optimizer = tf.keras.optimizers.Adam(3e-3)
    loss_of = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    @smp.step  # (2) The inputs may be lists, dictionaries, or tensors one by one.
    def forward_backward(groups, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(groups, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    @smp.step
    def forward(groups):
        return model(groups, training=False)

    @tf.function
    def train_step(groups, labels):
        gradients, loss = forward_backward(groups, labels)
        gradients = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    batches = tf.data.Dataset.from_tensor_slices((tuple(train), train_labels)).shuffle(500, seed=1).batch(32)
    for epoch in range(args.epochs):
        losses = [float(train_step(list(groups), labels)) for groups, labels in batches]
        if smp.rank() == 0:
            print(f"epoch {epoch + 1:2d}: mean loss {np.mean(losses):.4f}")

    accuracy = np.mean((forward(test).concat().numpy() > 0) == (test_labels > 0))
    model.save_model(args.save)  # (3) tf.keras.models.load_model reads it, where there is no smp_tf
    if smp.rank() == 0:
        print(f"test accuracy {accuracy:.4f}, model saved in {args.save}")


if __name__ == "__main__":
    main()

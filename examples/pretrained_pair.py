"""Uses two pre-trained Keras models inside one model, and trains them on together, split over two processes.

    horovodrun -np 2 python examples/pretrained_pair.py     # one pre-trained model on each process
    python examples/pretrained_pair.py                      # in one process, the same losses

The data are scikit-learn's handwritten digits. One model has learned to read the upper halves of digits, the other the
lower halves. They are ordinary Keras models, trained by ordinary Keras and kept in files. The split model loads both
and reads whole digits. What makes that work is marked with (1) to (3).
"""

import argparse
from pathlib import Path

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow.keras import layers

HALVES = ("upper", "lower")


def digits():
    """Returns images of 8 x 8 and their labels; a fifth of them is for testing."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8).astype("float32")
    return train_test_split(images, labels.astype("int32"), test_size=0.2, random_state=0, stratify=labels)


def half_of(images, half):
    """Returns the upper or the lower four rows of images."""
    return images[:, :4] if half == "upper" else images[:, 4:]


def pretrain(half, file):
    """Trains a model on one half of the digits and writes it to a file. It uses nothing of smp_tf."""
    images, test_images, labels, test_labels = digits()
    reader = tf.keras.Sequential(
        [
            layers.Input((4, 8)),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(64, activation="relu", name="features"),
            layers.Dense(10),
        ],
        name=f"{half}_reader",
    )
    reader.compile(
        optimizer=tf.keras.optimizers.Adam(2e-3),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    reader.fit(half_of(images, half), labels, batch_size=64, epochs=8, verbose=0)
    _, accuracy = reader.evaluate(half_of(test_images, half), test_labels, verbose=0)
    reader.save(file)
    print(f"pre-trained on {half} halves: test accuracy {accuracy:.4f}, saved in {file}")


class PairReader(smp.DistributedModel):
    """Two pre-trained models, each for one half of a digit, and a layer that sees the outputs of both."""

    def __init__(self, folder):
        super().__init__()
        # (1) Because the models are loaded here, the first step reads each weight in the process that trains it. So no
        # process ever holds all weights.
        readers = [tf.keras.models.load_model(f"{folder}/{half}.keras", compile=False) for half in HALVES]
        # (2) The loaded models may be changed with Keras. Here, all but the last layer of each is used.
        self.parts = [tf.keras.Model(r.input, r.get_layer("features").output, name=r.name) for r in readers]
        self.head = layers.Dense(10, name="head")

    def call(self, images):
        """Returns one score per digit."""
        features = [part(half_of(images, half)) for half, part in zip(HALVES, self.parts, strict=True)]
        return self.head(tf.concat(features, axis=-1))


def main():
    """Trains each half unless that was done before, trains the pair, tests and saves it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    parser.add_argument("--pretrained", type=Path, default=Path("digits_pretrained"), help="folder of the two models")
    parser.add_argument("--save", default="digits_pair", help="folder for the trained pair")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    if smp.rank() == 0:
        args.pretrained.mkdir(parents=True, exist_ok=True)
        for half in HALVES:
            file = args.pretrained / f"{half}.keras"
            if not file.exists():
                pretrain(half, file)
    smp.barrier()  # (3) All wait until the files are there.
    tf.keras.utils.set_random_seed(2)  # pre-training has drawn random numbers on one rank only

    model = PairReader(str(args.pretrained))
    optimizer = tf.keras.optimizers.Adam(1e-3)
    images, test_images, labels, test_labels = digits()

    @smp.step
    def forward_backward(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images)))
        return tape.gradient(loss, model.trainable_variables), loss

    @smp.step
    def forward(images):
        return model(images)

    @tf.function
    def train_step(images, labels):
        gradients, loss = forward_backward(images, labels)
        gradients = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    batches = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=1).batch(64)
    for epoch in range(args.epochs):
        losses = [float(train_step(*batch)) for batch in batches]
        if smp.rank() == 0:
            print(f"epoch {epoch + 1:2d}: mean loss {np.mean(losses):.4f}")

    accuracy = np.mean(forward(test_images).concat().numpy().argmax(-1) == test_labels)
    model.save_model(args.save)
    if smp.rank() == 0:
        print(f"test accuracy {accuracy:.4f} of both together, saved in {args.save}")


if __name__ == "__main__":
    main()

"""Distils a large network into a small one by fit, with the `train_step` of Keras's own example.

    horovodrun -np 2 python examples/distillation.py     # teacher and student on two processes
    python examples/distillation.py                      # in one process, the same losses

The teacher was trained by plain Keras and is in a file. Teacher and student are one model, which is cut as a whole. The
teacher is frozen: it has no gradients and no slots.
"""

import argparse
from pathlib import Path

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow.keras import layers

CROSS_ENTROPY = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def digits():
    """Returns images of digits to train and to test with, and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
    return train_test_split(images, labels, test_size=0.3, random_state=0, stratify=labels)


def network(width, name):
    """Returns a network of a width."""
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ],
        name=name,
    )


def pretrain(file):
    """Trains a teacher and writes it to a file. There is nothing of smp_tf in it."""
    images, test_images, labels, test_labels = digits()
    model = network(32, "teacher")
    model.compile(tf.keras.optimizers.Adam(2e-3), CROSS_ENTROPY, metrics=["accuracy"])
    model.fit(images, labels, batch_size=64, epochs=8, verbose=0)
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    model.save(file)
    print(f"teacher: test accuracy {accuracy:.4f}, saved in {file}")


class Distiller(smp.DistributedModel):
    """A student that learns what a teacher says, besides the labels."""

    def __init__(self, teacher, student, temperature=4.0, share=0.3):
        super().__init__(name="distiller")
        teacher.trainable = False
        self.teacher, self.student, self.temperature, self.share = teacher, student, temperature, share
        self.apart = tf.keras.losses.KLDivergence()

    def call(self, images):
        """Returns what the student says."""
        return self.student(images)

    def train_step(self, data):
        """Trains the student on a batch."""
        images, labels = data
        taught = self.teacher(images, training=False)
        with tf.GradientTape() as tape:
            said = self.student(images, training=True)
            of_labels = CROSS_ENTROPY(labels, said)
            softly = [tf.nn.softmax(scores / self.temperature, axis=1) for scores in (taught, said)]
            of_teacher = self.apart(*softly) * self.temperature**2
            loss = self.share * of_labels + (1 - self.share) * of_teacher
        weights = self.student.trainable_variables
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "of_teacher": of_teacher, "norm": norm}

    def test_step(self, data):
        """Tries the student on a batch."""
        images, labels = data
        self.compiled_metrics.update_state(labels, self(images, training=False))
        return {metric.name: metric.result() for metric in self.metrics}


def main():
    """Trains the teacher unless that was done before, then the student, and tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    parser.add_argument("--teacher", type=Path, default=Path("teacher.keras"), help="file of the teacher")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    student = network(4, "student")  # before rank 0 makes layers of its own, so that all ranks name these alike
    if smp.rank() == 0 and not args.teacher.exists():
        pretrain(args.teacher)
    smp.barrier()  # all wait until the file is there
    tf.keras.utils.set_random_seed(2)  # training the teacher has drawn random numbers on one rank only

    images, test_images, labels, test_labels = digits()
    teacher = tf.keras.models.load_model(args.teacher, compile=False)
    model = Distiller(teacher, student)
    model.compile(tf.keras.optimizers.Adam(3e-3), metrics=[tf.keras.metrics.SparseCategoricalAccuracy("accuracy")])
    history = model.fit(images, labels, batch_size=64, epochs=args.epochs, verbose=0).history
    tested = model.evaluate(test_images, test_labels, batch_size=120, verbose=0, return_dict=True)
    if smp.rank() == 0:
        for epoch, (loss, norm) in enumerate(zip(history["loss"], history["norm"], strict=True), start=1):
            print(f"epoch {epoch:2d}: mean loss {loss:.4f}, norm of the last gradient {norm:.4f}")
        print(f"student: test accuracy {tested['accuracy']:.4f}")


if __name__ == "__main__":
    main()

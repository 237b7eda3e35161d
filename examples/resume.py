"""Trains with evaluation and checkpoints, stops, and goes on later on another number of processes.

    horovodrun -np 2 python examples/resume.py --epochs 3                  # two partitions; a checkpoint per epoch
    horovodrun -np 3 python examples/resume.py --epochs 5 --partitions 3   # goes on at epoch 4, on three
    python examples/resume.py --epochs 6                                   # and in one process

The losses are those of a training that was never stopped. The parts for checkpoints are marked with (1) to (4).
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow.keras import layers


class Net(smp.DistributedModel):
    """Four dense layers with dropout between them."""

    def __init__(self):
        super().__init__()
        self.hidden = [layers.Dense(width, activation="relu") for width in (256, 128, 64)]
        self.drop = layers.Dropout(0.2)
        self.head = layers.Dense(10)

    def call(self, images, training=False):
        """Returns one score per digit."""
        x = images
        for layer in self.hidden:
            x = self.drop(layer(x), training=training)
        return self.head(x)


def main():
    """Goes on from the latest checkpoint, if there is one, to the wanted epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="epochs in all, those before the checkpoint included")
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    parser.add_argument("--checkpoints", default="digits_checkpoints", help="folder for the checkpoints")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels.astype("int32"), test_size=0.2, random_state=0, stratify=labels
    )

    model = Net()
    rate = tf.keras.optimizers.schedules.ExponentialDecay(2e-3, 50, 0.9)
    optimizer = tf.keras.optimizers.Adam(rate)
    epochs_done = tf.Variable(0)
    best_accuracy = tf.Variable(0.0)

    # (1) All that a training needs to go on: weights, the optimizer's state, and the script's own variables.
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epochs_done=epochs_done, best=best_accuracy)
    # (2) Call this on every rank. The two latest checkpoints are kept.
    manager = smp.CheckpointManager(checkpoint, args.checkpoints, max_to_keep=2)

    @smp.step
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
        gradients = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    @tf.function
    def count_correct(images, labels):
        return tf.reduce_sum(tf.cast(tf.argmax(forward(images).concat(), 1, tf.int32) == labels, tf.float32))

    # (3) This takes the latest checkpoint, saved on any number of partitions. The first step builds the model and gives
    # it its weights. No rank ever reads another's weights.
    restored = manager.restore()
    if restored and smp.rank() == 0:
        print(f"{restored} restored: {int(epochs_done)} epochs done, best accuracy {float(best_accuracy):.4f}")

    for epoch in range(int(epochs_done), args.epochs):
        # Shuffled by the number of the epoch, so that a resumed training sees what it would have seen.
        data = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        data = data.shuffle(len(train_images), seed=epoch).batch(64)
        loss = sum(float(train_step(*batch)) for batch in data) / len(data)
        accuracy = float(count_correct(test_images, test_labels)) / len(test_images)
        epochs_done.assign(epoch + 1)
        best_accuracy.assign(max(accuracy, float(best_accuracy)))
        # (4) All ranks save together. Whenever the job is killed, there is a whole checkpoint.
        saved = manager.save()
        if smp.rank() == 0:
            print(f"epoch {epoch + 1:2d}: mean loss {loss:.4f}, test accuracy {accuracy:.4f}, saved in {saved}")


if __name__ == "__main__":
    main()

"""A training script for SageMaker's model parallel library, as one wrote it in 2021: with checkpoints and a profile.

Only the data is another: scikit-learn's digits in place of the download.
"""

# ruff: noqa: B905
# isort: off
import argparse

import tensorflow as tf
from tensorflow.keras.layers import BatchNormalization, Dense, Dropout
from sklearn.datasets import load_digits

import smdistributed.modelparallel.tensorflow as smp

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoint-dir", default="checkpoints")
args = parser.parse_args()

tf.config.optimizer.set_jit(True)
tf.random.set_seed(1234)
smp.init()

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(256, drop_remainder=True)


class MyModel(smp.DistributedModel):
    def __init__(self):
        super(MyModel, self).__init__()  # noqa: UP008
        self.d0 = Dense(64, activation="relu")
        self.bn = BatchNormalization()
        self.drop = Dropout(0.3)
        self.d1 = Dense(32, activation="relu")
        self.d2 = Dense(10)

    def call(self, x, training=None):
        x = self.drop(self.bn(self.d0(x), training=training), training=training)
        return self.d2(self.d1(x))


model = MyModel()
model.profile(tf.zeros([64, 64]))

loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(learning_rate=0.002)
epochs_done = tf.Variable(0, dtype=tf.int64)

checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model, epochs=epochs_done)
manager = smp.CheckpointManager(checkpoint, args.checkpoint_dir, max_to_keep=2)
manager.restore()


@smp.step(input_signature=[tf.TensorSpec([None, 64], tf.float32), tf.TensorSpec([None], tf.int64)])
def get_grads(images, labels):
    predictions = model(images, training=True)
    loss = loss_object(labels, predictions)
    grads = optimizer.get_gradients(loss, model.trainable_variables)
    return grads, loss


@tf.function
def train_step(images, labels):
    gradients, loss = get_grads(images, labels)
    gradients = [g.accumulate() for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss.reduce_mean()


while int(epochs_done) < args.epochs:
    for batch, (x, y) in enumerate(dataset):
        loss = train_step(x, y)
        if smp.dp_rank() == 0 and batch % 2 == 0:
            print("epoch", int(epochs_done), "batch", batch, f"loss {float(loss):.5f}")
    epochs_done.assign_add(1)
    manager.save()

smp.core.barrier()

"""A training script for SageMaker's model parallel library, as one wrote it in 2020: MNIST without Horovod.

Only the data is another: scikit-learn's digits in place of the download.
"""

# ruff: noqa: B905
# isort: off
import os
import tempfile

import tensorflow as tf
from tensorflow.keras.layers import Conv2D, Dense, Flatten
from sklearn.datasets import load_digits

import smdistributed.modelparallel.tensorflow as smp
from smdistributed.modelparallel.tensorflow.utils import receive_checkpoint_files, send_checkpoint_files

tf.random.set_seed(1234)
cfg = {
    "microbatches": 2,
    "placement_strategy": "spread",
    "pipeline": "simple",
    "optimize": "memory",
    "partitions": 2,
    "fork": True,
    "xla": False,
}
smp.init(cfg)
tf.config.optimizer.set_jit(False)

x, y = load_digits(return_X_y=True)
x, y = (x / 16.0).reshape(-1, 8, 8).astype("float32"), y
x_train, x_test, y_train, y_test = x[:1280], x[1280:], y[:1280], y[1280:]
x_train, x_test = x_train[..., tf.newaxis], x_test[..., tf.newaxis]

train_ds = (
    tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000, seed=1234).batch(128, drop_remainder=True)
)
test_ds = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(128, drop_remainder=True)


class MyModel(smp.DistributedModel):
    def __init__(self):
        super(MyModel, self).__init__()  # noqa: UP008
        self.conv1 = Conv2D(16, 3, activation="relu")
        self.flatten = Flatten()
        self.d1 = Dense(64, activation="relu")
        self.d2 = Dense(10)

    def call(self, x):
        x = self.conv1(x)
        x = self.flatten(x)
        x = self.d1(x)
        return self.d2(x)


model = MyModel()

loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(lr=0.002)
train_loss = tf.keras.metrics.Mean(name="train_loss")
train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
test_loss = tf.keras.metrics.Mean(name="test_loss")
test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")


@smp.register_post_partition_hook
def show():
    print("partitioned into", smp.mp_size(), "with", len(model.local_variables), "variables here")


@smp.step
def get_grads(images, labels):
    predictions = model(images, training=True)
    loss = loss_object(labels, predictions)
    grads = optimizer.get_gradients(loss, model.trainable_variables)
    return grads, loss, predictions


@tf.function
def train_step(images, labels):
    gradients, loss, predictions = get_grads(images, labels)
    gradients = [g.accumulate() for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_loss(loss.reduce_mean())
    train_accuracy(labels, predictions.merge())
    return loss.reduce_mean()


@smp.step
def test_step(images, labels):
    predictions = model(images, training=False)
    t_loss = loss_object(labels, predictions)
    test_loss(t_loss)
    test_accuracy(labels, predictions)


for epoch in range(3):
    train_loss.reset_states()
    train_accuracy.reset_states()
    test_loss.reset_states()
    test_accuracy.reset_states()

    for images, labels in train_ds:
        train_step(images, labels)
    for test_images, test_labels in test_ds:
        test_step(test_images, test_labels)

    template = "Epoch {}, Loss: {:.5f}, Accuracy: {:.5f}, Test Loss: {:.5f}, Test Accuracy: {:.5f}"
    print(
        template.format(
            epoch + 1,
            train_loss.result(),
            train_accuracy.result() * 100,
            test_loss.result(),
            test_accuracy.result() * 100,
        )
    )

smp.core.barrier()

# The training host hands its files to the other one.
if smp.size() > 1:
    folder = tempfile.mkdtemp()
    if smp.rank() == 0:
        os.makedirs(os.path.join(folder, "mp_rank_0"))
        with open(os.path.join(folder, "mp_rank_0", "ckpt-1.data"), "wb") as file:
            file.write(bytes(range(256)) * 20000)
        send_checkpoint_files(folder, 1)
    elif smp.rank() == 1:
        receive_checkpoint_files(folder, 0)
        with open(os.path.join(folder, "mp_rank_0", "ckpt-1.data"), "rb") as file:
            print("received", file.read() == bytes(range(256)) * 20000)

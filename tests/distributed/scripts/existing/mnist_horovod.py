"""A training script for SageMaker's model parallel library with Horovod for data parallelism, as written in 2020.

Only the data is another, and every replica takes its share of one list of batches, so that all shares together are
what one process is given.
"""

# ruff: noqa: B905
# isort: off
import random

import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd
import smdistributed.modelparallel.tensorflow as smp
from sklearn.datasets import load_digits

# smp.init() takes the JSON in SM_HP_MP_PARAMETERS.
smp.init()
random.seed(42)
np.random.seed(42)
tf.random.set_seed(42)

x, y = load_digits(return_X_y=True)
x, y = (x / 16.0)[..., tf.newaxis].reshape(-1, 8, 8, 1), y.astype("uint8")
x_test, y_test = x[1536:1664].astype("float64"), y[1536:1664]
BATCH = 128
mine = slice(hvd.rank() * BATCH // hvd.size(), (hvd.rank() + 1) * BATCH // hvd.size())
batches = [(x[i : i + BATCH][mine], y[i : i + BATCH][mine]) for i in range(0, 1536, BATCH)]


class MyModel(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.conv1 = tf.keras.layers.Conv2D(8, 3, activation="relu", dtype="float64")
        self.flatten = tf.keras.layers.Flatten(dtype="float64")
        self.d1 = tf.keras.layers.Dense(64, activation="relu", dtype="float64")
        self.d2 = tf.keras.layers.Dense(10, dtype="float64")

    def first(self, x):
        return self.conv1(x)

    def call(self, x, training=None):
        return self.d2(self.d1(self.flatten(self.first(x))))


model = MyModel()
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(learning_rate=0.003)
test_loss = tf.keras.metrics.Mean(name="test_loss", dtype="float64")
test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

SIGNATURE = [tf.TensorSpec(shape=(None, 8, 8, 1), dtype=tf.float64), tf.TensorSpec(shape=(None,), dtype=tf.uint8)]


@smp.step(input_signature=SIGNATURE)
def get_grads(images, labels):
    predictions = model(images, training=True)
    loss = loss_object(labels, predictions)
    grads = optimizer.get_gradients(loss, model.trainable_variables)
    return grads, loss


@tf.function
def train_step(images, labels, first_batch):
    gradients, loss = get_grads(images, labels)
    # Averaged over the microbatches, then over the replicas.
    gradients = [hvd.allreduce(g.accumulate()) for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    return hvd.allreduce(loss.reduce_mean())


@smp.step(input_signature=SIGNATURE)
def test_step(images, labels):
    predictions = model(images, training=False)
    t_loss = loss_object(labels, predictions)
    test_loss(t_loss)
    test_accuracy(labels, predictions)


for epoch in range(2):
    test_loss.reset_states()
    test_accuracy.reset_states()
    for batch, (images, labels) in enumerate(batches):
        loss = train_step(images, labels, epoch == 0 and batch == 0)
        if hvd.rank() == 0 and smp.mp_rank() == 0 and batch % 4 == 0:
            print(f"epoch {epoch} batch {batch} loss {loss:.10f}")
    test_step(x_test, y_test)
    print(f"epoch {epoch} test loss {test_loss.result():.10f} accuracy {test_accuracy.result():.4f}")

total = hvd.allreduce(tf.constant(float(smp.rank())), op=hvd.Sum)
print("replica", hvd.rank(), "of", hvd.size(), "local rank", hvd.local_rank(), "ranks in all", int(total))
smp.barrier()

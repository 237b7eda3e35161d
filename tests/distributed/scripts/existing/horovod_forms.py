"""A script for SageMaker's model parallel library that uses Horovod in many of its forms.

A tensor says which batch is the first, as the library's documentation has it, and the ranks of one partition average
once more when those of the other are done. Only the data is another: scikit-learn's digits in place of the download.
"""

# ruff: noqa: B905
# isort: off
import tensorflow as tf
import horovod.tensorflow as hvd
import smdistributed.modelparallel.tensorflow as smp
from tensorflow.keras.layers import Dense
from sklearn.datasets import load_digits

hvd.init()
smp.init({"partitions": 2, "microbatches": 2, "horovod": True, "placement_strategy": "spread"})
tf.random.set_seed(8)

x, y = load_digits(return_X_y=True)
train_ds = tf.data.Dataset.from_tensor_slices((x[:1024] / 16.0, y[:1024]))
train_ds = train_ds.shard(hvd.size(), hvd.rank()).batch(128 // hvd.size())


class MyModel(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.d1 = Dense(32, activation="relu")
        self.d2 = Dense(10)

    def call(self, x, training=None):
        return self.d2(self.d1(x))


model = MyModel()
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(1e-3 * hvd.size() * 2 / hvd.size(), decay=1e-2)
compression = hvd.Compression.fp16


@smp.step
def get_grads(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_object(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    return tape.gradient(loss, model.trainable_variables), loss


@tf.function
def train_step(images, labels, first_batch):
    gradients, loss = get_grads(images, labels)
    gradients = [hvd.allreduce(g.accumulate(), compression=compression) for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    return loss.reduce_mean()


for epoch in range(2):
    for batch, (images, labels) in enumerate(train_ds):
        loss = train_step(images, labels, tf.constant(epoch == 0 and batch == 0))
    average = hvd.allreduce(loss, name="loss", average=True)
    every = hvd.allgather(tf.reshape(loss, [1]))
    if hvd.rank() == 0:
        print(f"epoch {hvd.broadcast_object(epoch, 0)} loss {average:.5f} lr {optimizer._decayed_lr(tf.float32):.6f}")
    else:
        hvd.broadcast_object(None, 0)
assert every.shape == [hvd.size()]

if smp.mp_rank() == 0:
    for _ in range(200):
        average = hvd.allreduce(average)
    print(f"at last {average:.5f}")
hvd.shutdown()

"""A script for SageMaker's model parallel library that places its layers by hand."""

# ruff: noqa: B905
# isort: off
import tensorflow as tf
import smdistributed.modelparallel.tensorflow as smp
from tensorflow.keras.layers import Dense, Flatten
from sklearn.datasets import load_digits

tf.random.set_seed(3)
smp.init({"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0, "contiguous": False})
x, y = load_digits(return_X_y=True)
x, y = (x / 16.0).astype("float32"), y.astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(128, drop_remainder=True)


class Net(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.flatten = Flatten()
        self.a = Dense(32, activation="relu")
        self.b = Dense(32)
        self.c = Dense(32, activation="relu")
        with smp.partition(1):
            self.head = Dense(10)

    def call(self, x):
        x = self.a(self.flatten(x))
        with smp.partition(0):
            x = self.b(x)
        with smp.partition(1):
            x = tf.nn.relu(x) * 0.5
            x = self.c(x)
        return self.head(x)


model = Net()
optimizer = tf.keras.optimizers.SGD(lr=0.1, momentum=0.9, decay=1e-3)
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@smp.step
def forward_backward(images, labels):
    predictions = model(images)
    loss = loss_object(labels, predictions)
    return tf.gradients(loss, model.trainable_variables), loss, predictions


@tf.function
def train_step(images, labels):
    gradients, loss, predictions = forward_backward(images, labels)
    optimizer.apply_gradients(zip([g.accumulate() for g in gradients], model.trainable_variables))
    right = tf.equal(tf.argmax(predictions.merge(), 1), labels)
    return loss.reduce_mean(), tf.reduce_mean(tf.cast(right, tf.float32))


for epoch in range(3):
    for images, labels in dataset:
        loss, accuracy = train_step(images, labels)
    print(f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.4f}")
print("here:", " ".join(v.name for v in model.local_variables if "kernel" in v.name))

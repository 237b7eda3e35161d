"""A script for SageMaker's model parallel library that trains a residual network, as one ported it from Horovod.

Weight decay, batch normalisation, clipping by the norm of all gradients, and a learning rate that is set by hand. Only
the data is another: scikit-learn's digits in place of the download.
"""

# ruff: noqa: B905
# isort: off
import tensorflow as tf
import horovod.tensorflow as hvd
import smdistributed.modelparallel.tensorflow as smp
from tensorflow import keras
from tensorflow.keras import layers, regularizers
from sklearn.datasets import load_digits

smp.init({"partitions": 2, "microbatches": 2, "optimize": "speed", "placement_strategy": "cluster"})
tf.random.set_seed(0)

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
labels = keras.utils.to_categorical(labels, 10)
train_ds = tf.data.Dataset.from_tensor_slices((images[:512], labels[:512])).shuffle(512, seed=3)
train_ds = train_ds.batch(64, drop_remainder=True)


class ResidualBlock(layers.Layer):
    def __init__(self, filters, stride=1, **kwargs):
        super().__init__(**kwargs)
        self.c1 = layers.Conv2D(
            filters, 3, strides=stride, padding="same", use_bias=False, kernel_regularizer=regularizers.l2(1e-4)
        )
        self.b1 = layers.BatchNormalization(momentum=0.9)
        self.c2 = layers.Conv2D(filters, 3, padding="same", use_bias=False)
        self.b2 = layers.BatchNormalization(momentum=0.9, gamma_initializer="zeros")
        self.relu = layers.ReLU()
        if stride != 1:
            self.down = keras.Sequential([layers.Conv2D(filters, 1, strides=stride), layers.BatchNormalization()])
        else:
            self.down = lambda x, training=None: x

    def call(self, x, training=None):
        r = self.down(x, training=training)
        h = self.relu(self.b1(self.c1(x), training=training))
        return self.relu(layers.add([self.b2(self.c2(h), training=training), r]))


class ResNet(smp.DistributedModel):
    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = keras.Sequential([layers.Conv2D(8, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()])
        self.layer1 = keras.Sequential([ResidualBlock(8)])
        self.layer2 = keras.Sequential([ResidualBlock(16, 2), ResidualBlock(16)])
        self.avgpool = layers.GlobalAveragePooling2D()
        self.drop = layers.Dropout(0.1)
        self.fc = layers.Dense(num_classes, kernel_regularizer=regularizers.l2(1e-4))

    def call(self, inputs, training=None):
        x = self.stem(inputs, training=training)
        x = self.layer2(self.layer1(x, training=training), training=training)
        return self.fc(self.drop(self.avgpool(x), training=training))


model = ResNet()
criterion = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
optimizer = keras.optimizers.SGD(learning_rate=0.05, momentum=0.9)
accuracy = keras.metrics.CategoricalAccuracy()


@smp.step
def get_grads(images, labels):
    predictions = model(images, training=True)
    loss = criterion(labels, predictions) + tf.add_n(model.losses)
    return optimizer.get_gradients(loss, model.trainable_variables), loss


@tf.function
def train_step(images, labels, first_batch):
    gradients, loss = get_grads(images, labels)
    gradients = [hvd.allreduce(g.accumulate()) for g in gradients]
    gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    return loss.reduce_mean(), norm


@smp.step
def evaluate(images, labels):
    accuracy.update_state(labels, model(images, training=False))


steps = 0
for epoch in range(2):
    accuracy.reset_states()
    for x, y in train_ds:
        if steps < 5:
            optimizer.lr = 0.05 * (steps + 1) / 5.0
        elif steps == 12:
            optimizer.learning_rate.assign(0.005)
        loss, norm = train_step(x, y, steps == 0)
        steps += 1
    for start in range(512, 1024, 128):
        evaluate(images[start : start + 128], labels[start : start + 128])
    rate = float(optimizer.lr)
    print(f"epoch {epoch} loss {loss:.4f} norm {norm:.3f} lr {rate:.4f} accuracy {accuracy.result():.3f}")
    print("steps", int(optimizer.iterations))

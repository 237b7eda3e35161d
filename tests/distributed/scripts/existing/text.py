"""A script for SageMaker's model parallel library that classifies sequences: masks, LSTMs, dropout, clipped gradients.

The data are made up in place of a download.
"""

# ruff: noqa: B905
# isort: off
import numpy as np
import tensorflow as tf
import smdistributed.modelparallel.tensorflow as smp
from tensorflow.keras.layers import LSTM, Bidirectional, Dense, Dropout, Embedding
from tensorflow.keras.preprocessing.sequence import pad_sequences

smp.init({"partitions": 2, "microbatches": 2})
tf.random.set_seed(11)

rng = np.random.RandomState(0)
sequences = [list(rng.randint(1, 50, size=rng.randint(5, 25))) for _ in range(192)]
labels = np.array([int(np.mean(sequence) > 25) for sequence in sequences]).astype("float32")
train_ds = tf.data.Dataset.from_tensor_slices((pad_sequences(sequences, maxlen=20), labels)).batch(64)


class TextModel(smp.DistributedModel):
    def __init__(self):
        super(TextModel, self).__init__()  # noqa: UP008
        self.emb = Embedding(50, 16, mask_zero=True)
        self.lstm = Bidirectional(LSTM(12, return_sequences=True))
        self.lstm2 = LSTM(8)
        self.drop = Dropout(0.2)
        self.out = Dense(1, activation="sigmoid")

    def call(self, x, training=None):
        h = self.lstm(self.emb(x), training=training)
        h = self.lstm2(h, training=training)
        return self.out(self.drop(h, training=training))


model = TextModel()
opt = tf.keras.optimizers.RMSprop(1e-2, clipnorm=1.0)
bce = tf.keras.losses.BinaryCrossentropy()
train_loss = tf.keras.metrics.Mean()
auc = tf.keras.metrics.AUC()


@smp.step
def get_grads(x, y):
    with tf.GradientTape() as tape:
        p = model(x, training=True)
        loss = bce(y[:, None], p)
    return tape.gradient(loss, model.trainable_variables), loss, p


@tf.function
def train_step(x, y):
    gradients, loss, p = get_grads(x, y)
    opt.apply_gradients(list(zip([g.accumulate() for g in gradients], model.trainable_variables)))
    train_loss.update_state(loss.reduce_mean())
    auc.update_state(y, tf.squeeze(p.merge(), -1))


for epoch in range(3):
    train_loss.reset_states()
    auc.reset_states()
    for x, y in train_ds:
        train_step(x, y)
    print(f"epoch {epoch} loss {train_loss.result():.5f} auc {auc.result():.4f}")

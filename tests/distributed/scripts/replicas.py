"""Trains a small model on replicas of two partitions, which part ways as the command line says.

    replicas.py MODES [--steps 3] [--at 1] [--partitions 2] [--unchecked]

Modes, one or several with blanks between them:

    apart      before step `--at`, the last replica adds to a weight
    together   all replicas read the same batches
    meeting    from the fifth call on all replicas read the same batches
    own        every replica reads its own batches
    other      at step `--at`, the last replica calls another step function, which all have called before

A rank prints "finished" when all steps are done.
"""

import argparse

import smp_tf as smp

# isort: split
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("modes", type=str.split)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--at", type=int, default=1)
parser.add_argument("--partitions", type=int, default=2)
parser.add_argument("--unchecked", action="store_true", help="switch the checks off")
args = parser.parse_args()

checks = {"check_replicas": False, "check_inputs": False} if args.unchecked else {}
smp.init({"partitions": args.partitions, "microbatches": 2, "seed": 1, **checks})
is_last = smp.dp_rank() == smp.dp_size() - 1


class Net(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh", name="hidden")
        self.head = layers.Dense(3, name="head")

    def call(self, x):
        return self.head(self.hidden(x))


net = Net()
optimizer = tf.keras.optimizers.SGD(0.01)


@smp.step
def forward_backward(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(x) - y) ** 2)
    return loss, tape.gradient(loss, net.trainable_variables)


@smp.step
def penalty_of(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(net(x) ** 2)
    return tape.gradient(loss, net.trainable_variables)


@tf.function
def train_step(x, y):
    loss, gradients = forward_backward(x, y)
    sums = [gradient.accumulate() for gradient in gradients]
    optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    return loss.reduce_mean()


def batch_of(step):
    is_common = "together" in args.modes or ("meeting" in args.modes and step >= 4)
    random = np.random.default_rng([step, 0 if is_common else smp.dp_rank()])
    return (
        tf.constant(random.standard_normal((8, 8)), tf.float32),
        tf.constant(random.standard_normal((8, 3)), tf.float32),
    )


def add_to_head():
    for variable in net.local_trainable_variables:
        if variable.name == "net/head/bias:0":
            variable.assign_add(tf.constant([0.0, 1e-6, 0.0]))


def main():
    if "other" in args.modes:
        penalty_of(batch_of(0)[0])
    for step in range(args.steps):
        if "other" in args.modes and is_last and step == args.at:
            penalty_of(batch_of(step)[0])
        if "apart" in args.modes and is_last and step == args.at:
            add_to_head()
        train_step(*batch_of(step)).numpy()
    print("finished", flush=True)


main()

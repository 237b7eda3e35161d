"""Trains on two ranks, until rank `--odd` does what MODE says at step 3.

shape    passes a batch of another size
step     calls another step function
known    calls another step function, which every rank has called before
caught   nothing odd: a label of step 3 is bad, which the last stage notices and whoever it fails on catches
left     the same, and that rank leaves the loop for a barrier
"""

import argparse

import smp_tf as smp

# isort: split
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--odd", type=int, default=1)
args = parser.parse_args()

smp.init({"microbatches": 2, "seed": 1, "check_inputs": args.mode not in ("caught", "left")})


class Net(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.hidden = [layers.Dense(16, activation="tanh") for _ in range(smp.mp_size() - 1)]
        self.head = layers.Dense(3)

    def call(self, x):
        for layer in self.hidden:
            x = layer(x)
        return self.head(x)


net = Net()


@smp.step
def train(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(net(x) ** 2)
    return loss, tape.gradient(loss, net.trainable_variables)


@smp.step
def train_checked(x, y):
    with tf.GradientTape() as tape:
        predicted = net(x)
        with tf.control_dependencies([tf.debugging.assert_less(y, 4, message="bad label")]):
            loss = tf.reduce_mean((predicted - tf.cast(y, tf.float32)) ** 2)
    return loss, tape.gradient(loss, net.trainable_variables)


@smp.step
def evaluate(x):
    return tf.reduce_mean(net(x))


if args.mode == "known":
    evaluate(tf.ones([16, 8]))

for number in range(6):
    misbehaves = smp.rank() == args.odd and number == 3
    samples = 12 if misbehaves and args.mode == "shape" else 16
    x = tf.constant(np.random.default_rng(number).standard_normal((samples, 8)), tf.float32)
    if misbehaves and args.mode in ("step", "known"):
        evaluate(x)
    elif args.mode in ("caught", "left"):
        labels = tf.constant([[9 if number == 3 and sample == 5 else 0] for sample in range(16)])
        try:
            loss, _ = train_checked(x, labels)
            loss.reduce_mean().numpy()
        except tf.errors.InvalidArgumentError:
            print(f"@@ caught in step {number}", flush=True)
            if args.mode == "left":
                smp.barrier()
                break
            continue
    else:
        loss, _ = train(x)
        loss.reduce_mean().numpy()
    print(f"@@ step {number} done", flush=True)

"""Runs steps with moments over the replicas on two replicas, until the second one does what MODE says.

leave    it ends after its second step
apart    it calls another step function than the first
"""

import argparse

import smp_tf as smp

# isort: split
import tensorflow as tf
from tensorflow.keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("mode")
args = parser.parse_args()
smp.init({"partitions": 1, "microbatches": 2, "seed": 1})


class Net(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.norm, self.head = layers.BatchNormalization(synchronized=True), layers.Dense(3)

    def call(self, x, training=False):
        return self.head(self.norm(x, training=training))


net = Net()


@smp.step
def one(x):
    return net(x, training=True)


@smp.step
def other(x):
    return 2 * net(x, training=True)


x = tf.random.stateless_normal([8, 4], [smp.rank(), 1])
for step in range(4):
    if smp.rank() == 1 and args.mode == "leave" and step == 2:
        break
    if step == 2 and args.mode == "apart":
        (one if smp.rank() == 0 else other)(x)
    else:
        one(x), other(x)
print("finished", flush=True)

"""Trains a model whose weights are 1.2 GB for two steps and prints this rank's peak.

large_model.py [--limit BYTES]      limit of the data segment, set before TensorFlow is imported
               [--save]             saves the model, too
"""

import argparse
import resource
import shutil
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--limit", type=int, default=None)
parser.add_argument("--save", action="store_true")
args = parser.parse_args()
if args.limit is not None:
    resource.setrlimit(resource.RLIMIT_DATA, (args.limit, args.limit))

import smp_tf as smp  # noqa: E402

# isort: split
import tensorflow as tf  # noqa: E402
from tensorflow.keras import layers  # noqa: E402

WIDTH, DEPTH = 5000, 12  # 12 weights of 100 MB

smp.init({"microbatches": 2, "seed": 1})


class Net(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.hidden = [layers.Dense(WIDTH, use_bias=False) for _ in range(DEPTH)]

    def call(self, x):
        for layer in self.hidden:
            x = layer(x)
        return x


net = Net()
# Momentum: a slot for every weight.
optimizer = tf.keras.optimizers.SGD(1e-4, momentum=0.9)


@smp.step
def forward_backward(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(net(x) ** 2)
    return loss, tape.gradient(loss, net.trainable_variables)


@tf.function
def train_step(x):
    loss, gradients = forward_backward(x)
    sums = [gradient.accumulate() for gradient in gradients]
    optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    return loss.reduce_mean()


def say(what):
    status = Path("/proc/self/status").read_text().split("\n")
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status if "kB" in line}
    print(f"{what}: resident peak {sizes['VmHWM']}, data {sizes['VmData']}", flush=True)


say("started")
for step in range(2):
    # One sample per microbatch: for two, TensorFlow packs each weight anew, which takes as long as the rest together.
    print(f"loss {float(train_step(tf.ones((2, WIDTH)) * (step + 1))):.6f}", flush=True)
say("trained")
if args.save:
    folder = tempfile.mkdtemp()
    net.save_model(folder + "/model")
    say("saved")
    shutil.rmtree(folder)

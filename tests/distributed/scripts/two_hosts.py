"""Trains two replicas of two partitions, and tells what went between the hosts that they are on.

    two_hosts.py [--kill RANK] [--kill-in-init RANK]

Each rank prints "training" and its losses, transports and ports as JSON; then, where one is to be killed, that rank is,
while the others are in the next step. Otherwise it prints "finished". One that is to be killed in smp.init is while
Horovod starts there.
"""

import argparse
import itertools
import json
import os
import signal

import smp_tf as smp

# isort: split
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

from smp_tf.job import runtime
from smp_tf.start import arrivals
from tests.ops.rank_process import network_sockets

STEPS = 4

parser = argparse.ArgumentParser()
parser.add_argument("--kill", type=int)
parser.add_argument("--kill-in-init", type=int)
args = parser.parse_args()
if args.kill_in_init == int(os.environ.get("HOROVOD_RANK", "-1")):

    def die_when_all_have_come(**_):
        arrivals._starts = itertools.repeat(1)
        while arrivals.Arrivals().missing() != []:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    hvd.init = die_when_all_have_come

smp.init({"partitions": 2, "microbatches": 2, "seed": 1})


class Net(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        # More than fits a message that travels with its header.
        self.hidden = layers.Dense(512, activation="tanh")
        self.head = layers.Dense(3)

    def call(self, x):
        return self.head(self.hidden(x))


net = Net()
optimizer = tf.keras.optimizers.SGD(0.01)


@smp.step
def forward_backward(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(x) - y) ** 2)
    return loss, tape.gradient(loss, net.trainable_variables)


@tf.function
def train_step(x, y):
    loss, gradients = forward_backward(x, y)
    sums = [gradient.accumulate() for gradient in gradients]
    optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    return loss.reduce_mean()


def batch_of(step):
    random = np.random.default_rng([step, smp.dp_rank()])
    return (
        tf.constant(random.standard_normal((64, 8)), tf.float32),
        tf.constant(random.standard_normal((64, 3)), tf.float32),
    )


def listening():
    """The IPv4 addresses at which this process waits for connections."""
    found = set()
    for line in network_sockets():
        kind, _, local, _, state = line.split()[:5]
        if state == "0A":
            address = bytes.fromhex(local.split(":")[0])
            found.add(".".join(str(byte) for byte in reversed(address)) if kind == "tcp" else f"{kind} {local}")
    return sorted(found)


def main():
    losses = [float(train_step(*batch_of(step))) for step in range(STEPS)]
    transport = runtime.current().transport
    told = {
        "rank": smp.rank(),
        "replica": smp.dp_rank(),
        "host": os.uname().nodename,
        "process": os.getpid(),
        "losses": [loss.hex() for loss in losses],
        "lanes": {rank: transport.lanes(rank) for rank in range(smp.size()) if rank != smp.rank()},
        "reads": transport.reads_memory,
        "interface": os.environ.get("HOROVOD_GLOO_IFACE"),
        "listening": listening(),
    }
    print(f"training {json.dumps(told)}", flush=True)
    smp.barrier()
    if smp.rank() == args.kill:
        # All others have said what they had to: they wait for this rank.
        os.kill(os.getpid(), signal.SIGKILL)
    if args.kill is not None:
        train_step(*batch_of(STEPS))
    print("finished", flush=True)


main()

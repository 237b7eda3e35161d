"""Trains a small model, and lets one rank misbehave as the command line says.

    training.py MODE [--steps 8] [--rank 1] [--at 3] [--save [TIMES]] [--partitions P]

Each rank prints a line when something has happened: "imported", "initialised", "tracing",
"step 0 done" and so on, "saving", "finished". MODE says what the rank `--rank` does at step `--at`:

    well     nothing special
    raise    raises an exception
    leave    leaves the loop and ends, as if its data had run out; with --wait the others begin the step only then
    exit     calls sys.exit(3)
    shape    passes a batch of another size
    data     passes other numbers
    model    has built a model of another width, from the start
    pause    waits forever before the step, so that the others wait inside TensorFlow; says so when rank 0 does
    hang     waits forever within the step
    late     waits for SIGUSR2 before smp.init, whatever the step, and says "late"
"""

import argparse
import atexit
import os
import signal
import sys
import tempfile
import threading

import smp_tf as smp

# isort: split
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

from smp_tf.job import runtime

print("imported", flush=True)
parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--at", type=int, default=3)
parser.add_argument("--save", type=int, nargs="?", const=1, default=0, help="how often to save at the end")
parser.add_argument("--stall-timeout", type=float, default=1800.0)
parser.add_argument("--partitions", type=int, help="as many as ranks, if not given")
parser.add_argument("--wait", action="store_true", help="begin the step when the other rank has left")
args = parser.parse_args()

if args.mode == "late" and int(os.environ["HOROVOD_RANK"]) == args.rank:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    print("late", flush=True)
    signal.sigwait({signal.SIGUSR2})

# Before what smp.init registers, so that it is called after that.
atexit.register(
    lambda: print("at exit:", *sorted(t.name for t in threading.enumerate() if t.name.startswith("smp_tf")), flush=True)
)
config = {"microbatches": 2, "seed": 1, "stall_timeout": args.stall_timeout}
smp.init(config if args.partitions is None else {**config, "partitions": args.partitions})
print("initialised", flush=True)
odd = smp.rank() == args.rank


class Net(smp.DistributedModel):
    def __init__(self, width):
        super().__init__()
        # A layer per partition: what the tests look at costs the same with more, and the first step more.
        self.hidden = [layers.Dense(width, activation="tanh") for _ in range(max(1, smp.mp_size() - 1))]
        self.head = layers.Dense(3)

    def call(self, x):
        if args.mode == "hang":
            x = tf.ensure_shape(tf.numpy_function(hang_or_not, [x], tf.float32), x.shape)
        for layer in self.hidden:
            x = layer(x)
        return self.head(x)


begun_steps = 0


def hang_or_not(x):
    if odd and begun_steps == args.at + 1:
        print("hanging", flush=True)
        threading.Event().wait()
    return x


net = Net(20 if odd and args.mode == "model" else 16)
optimizer = tf.keras.optimizers.SGD(0.01)


@smp.step
def forward_backward(x, y):
    print("tracing", flush=True)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(x) - y) ** 2)
    return loss, tape.gradient(loss, net.trainable_variables)


@tf.function
def train_step(x, y):
    loss, gradients = forward_backward(x, y)
    sums = [gradient.accumulate() for gradient in gradients]
    optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    return loss.reduce_mean()


def batch_of(step, misbehaves):
    random = np.random.default_rng(step)
    samples = 12 if misbehaves and args.mode == "shape" else 16
    x = random.standard_normal((samples, 8)).astype("float32")
    y = random.standard_normal((samples, 3)).astype("float32")
    if misbehaves and args.mode == "data":
        x[0, 0] += 1.0
    return tf.constant(x), tf.constant(y)


def await_step_of_rank_0(step):
    status = None
    while status is None or not status["in_step"] or status["step"] != step:
        status = runtime.current().transport.ask(0)


def main():
    global begun_steps
    for step in range(args.steps):
        begun_steps += 1
        misbehaves = odd and step == args.at
        if misbehaves and args.mode == "raise":
            raise LookupError(f"there is no sample number {step * 16}")
        if misbehaves and args.mode == "leave":
            return
        if misbehaves and args.mode == "exit":
            sys.exit(3)
        if args.wait and not odd and step == args.at:
            runtime.current().transport.await_goodbyes([args.rank], 60.0)
        if misbehaves and args.mode == "pause":
            await_step_of_rank_0(step)
            print("pausing", flush=True)
            threading.Event().wait()
        train_step(*batch_of(step, misbehaves)).numpy()
        print(f"step {step} done", flush=True)
    for count in range(args.save):
        if count == 0:
            print("saving", flush=True)
        net.save_model(tempfile.mkdtemp() + "/model")
    print("finished", flush=True)


main()

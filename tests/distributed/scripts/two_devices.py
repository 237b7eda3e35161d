"""Trains a model whose weights are on a device that is not the host's first, as those on a GPU are.

    two_devices.py [PARTITIONS]

A rank prints, for each way to offload: the losses, and where weights, sums and averages of gradients, slots and updates
are. On one partition, the default, it first does so of two, which are on one replica.
"""

import json
import sys
from types import SimpleNamespace

import smp_tf as smp

# isort: split
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

from smp_tf.pipeline.run import microbatch_sums

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
DEVICE = "CPU:1"


class Net(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh", name="hidden")
        self.head = layers.Dense(3, name="head")

    def call(self, x):
        return self.head(self.hidden(x))


devices_of_sums = set()


class NotedAccumulator(microbatch_sums.Accumulator):
    def __init__(self, *args):
        super().__init__(*args)
        devices_of_sums.add(short(self._variable.device))


def short(device):
    return device.rpartition("/device:")[2]


def trained():
    net = Net()
    optimizer = tf.keras.optimizers.Adam(0.01, global_clipnorm=0.5)

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

    x = np.random.RandomState(smp.dp_rank()).standard_normal((8, 5)).astype(np.float32)
    losses = [float(train_step(x, x[:, :3])) for _ in range(3)]
    graph = train_step.get_concrete_function(x, x[:, :3]).graph
    shapes = {tuple(weight.shape) for weight in net.trainable_variables}
    averages = [op for op in graph.get_operations() if op.type == "Mul" and not op.name.startswith("Adam/")]
    updates = [op for op in graph.get_operations() if op.name.startswith("Adam/") and op.type == "Sqrt"]
    weights = net.local_trainable_variables
    return {
        "losses": losses,
        "weights": sorted({short(weight.device) for weight in weights}),
        "slots": sorted({short(v.device) for v in optimizer.variables if v.shape.rank}),
        "averages": sorted({short(op.device) for op in averages if tuple(op.outputs[0].shape) in shapes}),
        "updates": sorted({short(op.device) for op in updates}),
    }


real_devices = tf.config.list_logical_devices


def devices_as_with_a_gpu(kind=None):
    """The second one is taken for a GPU: functions are then called by TensorFlow's own op, and plans know a host."""
    host, device = real_devices("CPU")
    gpu = SimpleNamespace(name=device.name, device_type="GPU")
    return {None: [host, gpu], "CPU": [host], "GPU": [gpu]}[kind]


microbatch_sums.Accumulator = NotedAccumulator
given = int(sys.argv[1]) if sys.argv[1:] else 1
runs = [(given, None, 2), (given, "gradient_offload", 2), (given, "optimizer_offload", 2)]
runs = [(2, None, 2), (2, "optimizer_offload", 2), *runs] if given == 1 else [*runs, (given, "gradient_offload", 1)]
for partitions, key, microbatches in runs:
    devices_of_sums.clear()
    smp.init({"partitions": partitions, "microbatches": microbatches, "seed": 1, **({key: True} if key else {})})
    if key is not None:
        tf.config.list_logical_devices = devices_as_with_a_gpu
    with tf.device(DEVICE):
        found = trained()
    told = {"key": key, "microbatches": microbatches, **found, "sums": sorted(devices_of_sums)}
    print("found", json.dumps(told), flush=True)
    smp.shutdown()

"""What a rank's program is made of, and what it does after the first step."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tf_keras import layers

import smp_tf as smp
from tests.distributed.cases.training import training_step
from tests.distributed.models import MODELS, gpt

# Counts bytes of the CPU's tensors; takes effect only before the first op.
_mapped = Path("/proc/self/maps").read_text().splitlines()
_framework = next(line.split()[-1] for line in _mapped if "libtensorflow_framework" in line)
ctypes.CDLL(_framework)._ZN3tsl23EnableCPUAllocatorStatsEv()


class Net(smp.DistributedModel):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.hidden = [layers.Dense(width, activation="tanh") for _ in range(depth)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for number, layer in enumerate(self.hidden):
            # As many on each: the planner gives fewer to a stage that keeps more microbatches.
            with smp.partition(number * smp.mp_size() // len(self.hidden)):
                x = layer(x)
        return x


class Training:
    """A training step, and how often Python ran its body."""

    def __init__(self, width: int, depth: int = 6) -> None:
        self.traced = 0
        net = Net(width, depth)
        optimizer = tf.keras.optimizers.SGD(0.01)

        @smp.step
        def forward_backward(x: tf.Tensor) -> Any:
            self.traced += 1
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(net(x) ** 2)
            return loss, tape.gradient(loss, net.trainable_variables)

        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            loss, gradients = forward_backward(x)
            sums = [gradient.accumulate() for gradient in gradients]
            optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
            return loss.reduce_mean()

        self.step = step


def program() -> dict[str, Any]:
    """The ops of a rank's training step, and the Python calls that one more step makes."""
    training = Training(16)
    x = tf.constant(np.ones((32, 16), np.float32))
    training.step(x)
    traced = training.traced
    graph = training.step.get_concrete_function(x).graph
    definition = graph.as_graph_def()
    ops = Counter(op.type for op in graph.get_operations())
    nested = Counter(node.op for f in definition.library.function for node in f.node_def)
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename.split("site-packages/")[-1]] += 1

    sys.setprofile(count)
    training.step(x)
    sys.setprofile(None)
    ours = {name: n for name, n in calls.items() if "tests/" in name or not name.startswith("tensor")}
    return {
        "sends": ops["SmpSend"] + nested["SmpSend"],
        "receives": ops["SmpRecv"] + nested["SmpRecv"],
        "horovod": sum(n for name, n in (ops + nested).items() if "orovod" in name),
        "python_ops": (ops + nested)["PyFunc"] + (ops + nested)["EagerPyFunc"],
        "functions": len(definition.library.function),
        "traced_again": training.traced - traced,
        "calls": sum(ours.values()),
        "own_calls": sum(n for name, n in calls.items() if "/smp_tf/" in name or "/pipeline/" in name),
    }


def start_time(blocks: int) -> dict[str, Any]:
    """Seconds from the first call of a training step of a GPT with so many blocks to its result."""
    entry = MODELS["gpt"]
    entry.prepare()
    net = gpt(smp.DistributedModel, blocks)
    optimizer = entry.optimizer()

    step = tf.function(training_step(entry, net, optimizer))
    batch = [tf.constant(np.repeat(array, 4, axis=0)) for array in entry.batch(0)]
    began = time.perf_counter()
    step(*batch).numpy()
    return {"seconds": time.perf_counter() - began}


def idle(seconds: float) -> dict[str, Any]:
    """What a rank costs that has trained and now waits: wakes of its threads, and processor time, in a second."""
    training = Training(16)
    training.step(tf.constant(np.ones((32, 16), np.float32))).numpy()
    switches, time_before = switches_of_threads(), time.process_time()
    threading.Event().wait(seconds)
    share = (time.process_time() - time_before) / seconds
    after = switches_of_threads()
    return {"wakes": sum(count - switches.get(thread, 0) for thread, count in after.items()) / seconds, "share": share}


def switches_of_threads() -> dict[str, int]:
    """How often each thread of this process has given up its processor, to sleep or to another thread."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        # It may have ended meanwhile.
        with contextlib.suppress(OSError):
            status = (thread / "status").read_text()
            found[thread.name] = sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
    return found


def peak_of_a_step(width: int, depth: int, samples: int) -> dict[str, Any]:
    """The largest number of bytes in tensors during a step, above what stays between steps.

    The least of twelve steps: a thread that waits for a processor holds for longer what it is done with, and so holds
    more in some of them, also when the next step begins. What is kept is kept in every step.
    """
    training = Training(width, depth)
    x = tf.constant(np.ones((samples, width), np.float32))
    training.step(x).numpy()
    befores, peaks = [], []
    for _ in range(12):
        tf.config.experimental.reset_memory_stats("CPU:0")
        befores.append(tf.config.experimental.get_memory_info("CPU:0")["current"])
        training.step(x).numpy()
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    return {"bytes": min(peaks) - min(befores)}

"""Jobs, one after the other in one process: each starts smp_tf, trains a model, and ends it."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import smp_tf as smp
from smp_tf.batch.output import StepOutput
from smp_tf.job.runtime import Runtime
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.steps.program import SplitProgram
from smp_tf.steps.step import Step
from smp_tf.steps.trace import StepTrace
from smp_tf.variables.store import VariableStore
from tests import module_state

#: What a job makes and leaves to Python to free; also variables, and graphs of TensorFlow's.
KINDS = (Runtime, VariableStore, Step, SplitProgram, StepTrace, StepOutput, OpGraph, tf.Variable, tf.Graph)


#: What the modules of smp_tf keep when a job has ended, and why.
KEPT = {
    "smp_tf.announce._said": "what was said once is not said again",
    "smp_tf.job.program_numbers._used": "it counts on: no later job has a number that messages of an ended one bear",
    "smp_tf.job.runtime._starts": "it counts jobs",
    "smp_tf.job.seeds._ours": "TensorFlow keeps what the last job seeded it with, which is no seed of the script's",
    "smp_tf.sharding.moved_slots._numbers": "it counts on: a script may use its optimizers in the next job",
    "smp_tf.start.arrivals._starts": "it counts starts",
    "smp_tf.variables.precedence._moments": "it counts on, as a clock: variables remember when they were given values",
    "smp_tf.variables.store._numbers": "it counts on: a script may use its models in the next job",
}


class Net(smp.DistributedModel):
    """Draws random numbers, and has a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.first = tf.keras.layers.Dense(6, activation="tanh")
        self.drop = tf.keras.layers.Dropout(0.25)
        self.second = tf.keras.layers.Dense(6, activation="relu")
        self.last = tf.keras.layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        """Passes the second layer twice."""
        x = self.drop(self.first(x), training=training)
        return self.last(self.second(self.second(x)))


def job(optimizer: str, *, saves: bool = False, fits: bool = False, **config: Any) -> dict[str, Any]:
    """Returns the arguments of `train` for a job.

    Args:
        optimizer: see `train`.
        saves: see `train`.
        fits: see `train`.
        **config: keys of the configuration; by default there is one partition, and a seed.
    """
    whole = {"partitions": 1, "seed": 5, **config}
    return {"config": whole, "optimizer": optimizer, "saves": saves, "fits": fits}


def train(config: Mapping[str, Any], optimizer: str, *, saves: bool, fits: bool, steps: int = 2) -> str:
    """Runs one job from its start to its end, with some of everything that keeps state.

    Args:
        config: given to `smp.init`.
        optimizer: a class of `tf.keras.optimizers`.
        saves: whether it records a timeline of the last step, writes a checkpoint and restores it.
        fits: whether Keras's loop trains, too.
        steps: how many.

    Returns:
        A hash of the weights that this rank has, and of the losses.
    """
    smp.init(config)
    smp.register_post_partition_hook(lambda: None)
    model = Net()
    optimizer = smp.DistributedOptimizer(getattr(tf.keras.optimizers, optimizer)(0.1, global_clipnorm=1.0))

    @smp.step
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        loss, gradients = step(x, y)
        sums = [None if gradient is None else gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    rng = np.random.default_rng(smp.dp_rank())
    digest = hashlib.blake2b(digest_size=8)
    folder = smp.allgather(tempfile.mkdtemp() if saves and smp.rank() == 0 else None, smp.WORLD)[0]
    for number in range(steps):
        x, y = rng.normal(size=(8, 5)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
        is_recorded = saves and number == steps - 1
        with smp.timeline(f"{folder}/timeline") if is_recorded else contextlib.nullcontext():
            digest.update(train_step(tf.constant(x), tf.constant(y)).numpy().tobytes())
    if fits:
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        model.fit(x, y, batch_size=8, verbose=0)
    if saves:
        manager = smp.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), folder)
        manager.save()
        manager.restore()
    for variable in model.local_variables:
        digest.update(variable.numpy().tobytes())
    is_first = smp.rank() == 0
    smp.shutdown()
    if saves and is_first:
        shutil.rmtree(folder)
    return digest.hexdigest()


def run(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Runs jobs in this process.

    Args:
        jobs: what `train` is given for each.

    Returns:
        `bits`: what `train` gave for each. `alive`: after each, how many objects of each kind there are. `state`: what
        modules hold now and did not before the first job. `threads`: the names of threads that have come.
    """
    module_state.import_all()
    # What was begun here without `smp.init` ends with the next job.
    smp.init()
    smp.shutdown()
    gc.collect()
    before, threads = module_state.snapshot(), set(threading.enumerate())
    bits, alive = [], []
    for job in jobs:
        bits.append(train(**job))
        alive.append(_alive())
    return {
        "bits": bits,
        "alive": alive,
        "state": module_state.differences(before, module_state.snapshot()),
        "threads": [thread.name for thread in set(threading.enumerate()) - threads],
    }


def left(found: Mapping[str, Any]) -> dict[str, str]:
    """Returns what jobs have left in modules, but for `KEPT`, in words.

    Args:
        found: what `run` gave.
    """
    return {path: words for path, words in found["state"].items() if path not in KEPT}


def unlike_the_first(found: Mapping[str, Any], order: Sequence[int]) -> list[str]:
    """Returns which jobs did not end as the first of their kind: with the same bits and as many objects.

    Args:
        found: what `run` gave.
        order: which kind each job was of.
    """
    return [
        f"job {number}: {key} {found[key][number]}, and of job {order.index(kind)} {found[key][order.index(kind)]}"
        for number, kind in enumerate(order)
        for key in ("bits", "alive")
        if found[key][number] != found[key][order.index(kind)]
    ]


def _alive() -> dict[str, int]:
    gc.collect()
    # Not by `isinstance`, which asks some objects for their class.
    by_type = Counter(map(type, gc.get_objects()))
    found: Counter[str] = Counter()
    for made, count in by_type.items():
        for kind in KINDS:
            if issubclass(made, kind):
                found[kind.__name__] += count
    return dict(found)

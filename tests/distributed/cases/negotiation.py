"""What Horovod's own timeline says of the averages of a training's steps."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import tensorflow as tf
from tf_keras import layers

import smp_tf as smp
from smp_tf.pipeline.run import reduction


def trained(folder: str, steps: int, sparse: bool = False) -> dict[str, Any]:
    """Trains for some steps, in small buckets.

    Args:
        folder: for the timeline.
        steps: how many.
        sparse: whether the model begins with an embedding, whose gradients are slices; then batches differ in size.

    Returns:
        "said": on rank 0, which leads the averages of the first stage and alone is told this, by the name of what was
        averaged: how often a rank said that it is ready for it, and how often that was done. "named": how many
        collectives the graph has by the task under whose name they stand. "tasks": those of this rank's list.
    """

    def net() -> tf.keras.Model:
        first = [layers.Embedding(100, 8), layers.GlobalAveragePooling1D()] if sparse else []
        return tf.keras.Sequential([*first, *(layers.Dense(8) for _ in range(4))])

    model = smp.DistributedModel(net)
    optimizer = tf.keras.optimizers.SGD(0.01)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def train(x: tf.Tensor) -> None:
        sums = [gradient.accumulate() for gradient in step(x)]
        optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))

    path = Path(folder) / "timeline.json"
    hvd.start_timeline(str(path))
    # Noticed with one of these, so that all is told of what comes.
    for number in range(2):
        hvd.allreduce(tf.zeros([]), name=f"begin_{number}", process_set=hvd.global_process_set)
    with mock.patch.object(reduction, "LEAST_BYTES", 1):
        for number in range(steps):
            samples = 4 + 4 * (number % 2) if sparse else 8
            x = tf.random.stateless_uniform([samples, 4], [number, smp.dp_rank()], 0, 100, tf.int32)
            train(x if sparse else tf.cast(x, tf.float32))
    smp.barrier()
    hvd.stop_timeline()
    last = x if sparse else tf.cast(x, tf.float32)
    program, _ = step.find(last)
    return {
        "said": said(path) if smp.rank() == 0 else {},
        "named": collectives_by_task(train.get_concrete_function(last).graph),
        "tasks": [str(task) for task in program.stage_program.tasks],
    }


def fitted() -> dict[str, Any]:
    """Fits a model for two batches.

    Returns:
        "named": how many collectives the graph of a batch has by the task under whose name they stand. "tasks": those
        of this rank's list.
    """
    model = smp.DistributedModel(lambda: tf.keras.Sequential([layers.Dense(8) for _ in range(4)]))
    model.compile(tf.keras.optimizers.Adam(global_clipnorm=1.0), "mse")
    x = tf.random.stateless_uniform([16, 4], [1, smp.dp_rank()])
    model.fit(x, tf.zeros([16, 8]), batch_size=8, verbose=0)
    [program] = model.train_function._step._programs.values()
    return {
        "named": collectives_by_task(program._eager.get_concrete_function().graph),
        "tasks": [str(task) for task in program.stage_program.tasks],
    }


def collectives_by_task(graph: tf.Graph) -> dict[str, int]:
    """Counts all of Horovod's ops that a graph and its branches have, by the task among the name scopes of each."""
    library = graph.as_graph_def().library.function
    inside = {
        function.signature.name: sum(node.op.startswith("Horovod") for node in function.node_def)
        for function in library
    }
    found: Counter[str] = Counter()
    for op in graph.get_operations():
        branches = [op.get_attr(name).name for name in ("then_branch", "else_branch") if name in op.node_def.attr]
        count = op.type.startswith("Horovod") + sum(inside[branch] for branch in branches)
        if count:
            scopes = (scope for scope in op.name.split("/") if re.fullmatch("[0-9]+[A-Z]+[0-9]*", scope))
            found[next(scopes, "no task")] += count
    return dict(found)


def said(path: Path) -> dict[str, list[int]]:
    """Reads a timeline, once Horovod has written all of it."""
    while not (text := path.read_text() if path.exists() else "").rstrip().endswith("]"):
        threading.Event().wait(0.01)
    names: dict[int, str] = {}
    found: dict[str, list[int]] = {}
    for event in json.loads(text):
        if event["name" if "name" in event else "ph"] == "process_name":
            names[event["pid"]] = event["args"].get("name", "")
        name = names.get(event.get("pid"), "")
        if name.startswith("smp_gradients"):
            counts = found.setdefault(name, [0, 0])
            # A rank's word is an event with its number for a name.
            counts[0] += event["ph"] == "X" and event["name"].isdecimal()
            counts[1] += event["ph"] == "B" and event["name"] in ("ALLREDUCE", "ALLTOALL", "ALLGATHER")
    return found

"""Measures how much of the time that replicas take to average gradients is hidden by the rest of a step.

    horovodrun -np 2 python benchmarks/overlap.py --partitions 1 --size medium --json overlap.json

trains a GPT on replicas in four ways, which take turns in the same processes:

    beside      gradients are averaged in buckets while the rest is computed, as smp_tf does it
    behind      the same buckets after the last task
    without     nothing is averaged: what a step would take if all of it were hidden (its results are wrong)
    horovod     the model in one tf.function with hvd.DistributedGradientTape, the whole share of a batch at once;
                with one partition only

"hidden" is (behind - beside) / (behind - without). Next to it stands what the timelines of "beside" say: how much of
the averaging was done before the last task had ended. Seconds are medians, with the quartiles, of interleaved
repetitions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import smp_tf as smp  # isort: split

import horovod.tensorflow as hvd
import tensorflow as tf
import tf_keras
from harness.machine import circumstances
from harness.options import named, new_file
from models.gpt import Size, build, size_of
from models.split_step import own_batch, split_step
from rich.console import Console
from rich.table import Table

from smp_tf.pipeline.programs.kinds import REDUCE
from smp_tf.pipeline.task import BucketMakers, Program

WAYS = ("beside", "behind", "without", "horovod")
SEED = 1


@contextlib.contextmanager
def patched(way: str) -> Iterator[None]:
    """Has a step traced to average its gradients in that way, within its context."""
    sums, program, tasks = (
        importlib.import_module(f"smp_tf.{name}")
        for name in ("replicas.sums", "pipeline.run.stage_program", "pipeline.run.step_tasks")
    )
    add = tasks.add_reductions

    def last(planned: Program, buckets: Sequence[BucketMakers]) -> Program:
        found = add(planned, buckets)
        ranks = tuple(tuple(sorted(tasks, key=lambda task: task.kind is REDUCE)) for tasks in found.ranks)
        return replace(found, ranks=ranks)

    with contextlib.ExitStack() as stack:
        if way == "behind":
            stack.enter_context(mock.patch.object(tasks, "add_reductions", last))
            stack.enter_context(mock.patch.object(program, "plan_early_sums", return_value=None))
        if way == "without":
            stack.enter_context(mock.patch.object(sums, "sum_gradients_at", lambda given, *_: (list(given), [])))
            own = importlib.import_module("smp_tf.replicas.sparse_sums").own_weighted_sum
            split = importlib.import_module("smp_tf.steps.program")
            stack.enter_context(mock.patch.object(split, "weighted_sum", lambda parts, weights, _: own(parts, weights)))
        yield


def horovod_way(size: Size) -> Callable[..., Any]:
    """Returns a training step of plain Keras and Horovod."""
    model = build(tf_keras.Model, size)
    optimizer = tf_keras.optimizers.SGD(0.01)

    @tf.function
    def train_step(tokens: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(following, model(tokens)))
        gradients = hvd.DistributedGradientTape(tape, sparse_as_dense=True).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step


def hidden_by_timeline(step: Callable[[], Any], steps: int) -> float:
    """Returns the share of the averaging, on all ranks, that was done before the last task had ended."""
    from smp_tf.offline.timeline_text import replicas_of
    from smp_tf.recording import timeline_file

    with tempfile.TemporaryDirectory() as folder:
        at = smp.allgather(folder, smp.WORLD)[0]
        with smp.timeline(at):
            for _ in range(steps):
                step()
        smp.barrier()
        found = [replica.averaging() for replica in replicas_of(timeline_file.read([Path(at)]))]
        smp.barrier()
    whole, hidden = (sum(times) for times in zip(*found, strict=True))
    return hidden / whole if whole else math.nan


def main() -> None:
    """Measures, and prints on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium", help='of gpt.py, such as "small" or "medium+tied=0"')
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--compression", choices=["bf16", "fp16"])
    parser.add_argument("--offload", action="store_true", help="add gradients up on the host (gradient_offload)")
    parser.add_argument("--json", type=new_file, help="write the times")
    args = parser.parse_args()
    size = named(size_of, args.size, "--size", parser)
    before = circumstances(args)
    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": args.microbatches,
            "gradient_compression": args.compression,
            "gradient_offload": args.offload,
            "check_replicas": False,
            "seed": SEED,
        }
    )
    if smp.dp_size() == 1:
        parser.error(
            f"one replica averages nothing: start {2 * args.partitions} processes, or more that the partitions divide"
        )
    batch = own_batch(size)
    ways = WAYS if args.partitions == 1 else WAYS[:-1]
    steps = {}
    for way in ways:
        steps[way] = horovod_way(size) if way == "horovod" else split_step(size, tf_keras.optimizers.SGD(0.01))
        with patched(way):
            # The first step is traced. In the second TensorFlow and Horovod make ready what they need.
            for _ in range(2):
                float(steps[way](*batch))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.repetitions):
        for way in ways:
            smp.barrier()
            began = time.perf_counter()
            float(steps[way](*batch))
            smp.barrier()
            seconds[way].append(time.perf_counter() - began)
    by_timeline = hidden_by_timeline(lambda: float(steps["beside"](*batch)), 5)
    if smp.rank() == 0:
        report(args, before, seconds, by_timeline)


def report(
    args: argparse.Namespace, before: dict[str, Any], seconds: dict[str, list[float]], by_timeline: float
) -> None:
    """Prints a table, and writes the times."""
    replicas = smp.dp_size()
    table = Table("way", "ms a step", "quartiles", "against behind")
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    for way, times in seconds.items():
        low, _, high = statistics.quantiles(times, n=4)
        ratio = statistics.median(a / b for a, b in zip(times, seconds["behind"], strict=True))
        table.add_row(way, f"{1e3 * medians[way]:.1f}", f"{1e3 * low:.1f} to {1e3 * high:.1f}", f"{ratio:.3f}")
    exposed = medians["behind"] - medians["without"]
    Console(width=100).print(table)
    if exposed > 0:
        print(
            f"hidden of {1e3 * exposed:.1f} ms: {(medians['behind'] - medians['beside']) / exposed:.0%} by steps, ",
            end="",
        )
    print(f"{by_timeline:.0%} by timelines; {args.partitions} partitions, {replicas} replicas, GPT {args.size}")
    if args.json is not None:
        told = {**before, "replicas": replicas, "seconds": seconds, "hidden_by_timelines": by_timeline}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

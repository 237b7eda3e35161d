"""Measures what it costs on a first batch to train as with the whole batch, and to check that (`check_losses`).

    horovodrun -np 2 python benchmarks/loss_check.py --partitions 2 --size small --json loss_check.json

trains a GPT by Keras's loop in three ways, which take turns in the same processes:

    parts    each microbatch is taken for a batch of its own: the step is traced once
    off      check_losses is false: the step is traced for the whole batch, too, and losses are tried
    on       it is true

Every repetition makes a model anew for each way. It measures the first batch, with the check, and the median of the
batches after it; of the first batch also the processor time of all ranks, which says more where others use the machine.
"over parts" is the median of the ratios of the repetitions, with its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from typing import Any
from unittest import mock

import smp_tf as smp  # isort: split

import tf_keras
from harness.machine import circumstances
from harness.options import named, new_file
from models.gpt import Size, build, size_of
from models.split_step import own_batch
from rich.console import Console
from rich.table import Table

from smp_tf.job import runtime
from smp_tf.job.exchange import allgather_json
from smp_tf.steps.trace import Examined
from smp_tf.training.batch_function import BatchFunction

WAYS = ("parts", "off", "on")
SEED = 1
#: Batches after the first one whose median is taken.
STEPS = 7


def measured(size: Size, way: str) -> tuple[float, float, float]:
    """Returns the seconds of a training's first batch, its processor time, and the median seconds of those after it."""
    running = runtime.current()
    runtime.install(dataclasses.replace(running, config=dataclasses.replace(running.config, check_losses=way == "on")))
    # A step that is not looked at is traced for a microbatch alone.
    unseen = mock.patch.object(BatchFunction, "_examine", lambda _, traced, retrace: Examined(traced))
    try:
        model = build(smp.DistributedModel, size)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
        tokens, following = own_batch(size)
        times, work = [], []
        with unseen if way == "parts" else contextlib.nullcontext():
            for _ in range(1 + STEPS):
                smp.barrier()
                began, worked = time.perf_counter(), time.process_time()
                model.train_on_batch(tokens, following)
                smp.barrier()
                times.append(time.perf_counter() - began)
                work.append(time.process_time() - worked)
    finally:
        runtime.install(running)
    return times[0], sum(allgather_json(work[0], name="the benchmark's times")), statistics.median(times[1:])


def main() -> None:
    """Measures, and prints on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", help='of gpt.py, such as "small" or "medium+tied=0"')
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=new_file, help="write the times")
    args = parser.parse_args()
    size = named(size_of, args.size, "--size", parser)
    before = circumstances(args)
    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": SEED})
    # What TensorFlow and Keras do once in a process belongs to neither way.
    measured(size, "on")
    seconds: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for turn in range(args.repetitions):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            seconds[way].append(measured(size, way))
    if smp.rank() == 0:
        report(args, before, seconds)


def report(
    args: argparse.Namespace, before: dict[str, Any], seconds: dict[str, list[tuple[float, float, float]]]
) -> None:
    """Prints a table, and writes the times."""
    table = Table("what", "way", "median", "least", "over parts", "quartiles")
    whats = ("s of the first batch", "s of processors for it", "s of a batch after it")
    for place, what in enumerate(whats):
        of_parts = [times[place] for times in seconds["parts"]]
        for way in WAYS:
            times = [found[place] for found in seconds[way]]
            over = [a / b for a, b in zip(times, of_parts, strict=True)]
            low, middle, high = statistics.quantiles(over, n=4)
            numbers = (f"{statistics.median(times):.3f}", f"{min(times):.3f}", f"{middle:.3f}")
            table.add_row(what, way, *numbers, f"{low:.3f} to {high:.3f}")
    Console(width=100).print(table)
    print(
        f"{args.partitions} partitions, {smp.dp_size()} replicas, {args.microbatches} microbatches, GPT {args.size}, "
        f"{args.repetitions} repetitions"
    )
    if args.json is not None:
        args.json.write_text(json.dumps({**before, "replicas": smp.dp_size(), "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()

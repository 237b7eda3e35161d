"""Measures what it costs to compare batches and replicas while training.

    horovodrun -np 2 python benchmarks/checks.py --partitions 1 --size medium --json checks.json

trains a GPT in three ways, which take turns in the same processes:

    off         neither batches nor weights are compared (check_inputs and check_replicas false)
    on          both are, on a step on which nothing is due: all but the first ten and every 100th
    due         both are, on a step on which they are due

Batches are compared among the ranks of a replica, weights among replicas. "over off" is the median of the ratios of
interleaved repetitions, with its quartiles; "of a training" is what a hundred steps take, one of which is due.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import smp_tf as smp  # isort: split

import tf_keras
from harness.machine import circumstances
from harness.options import named, new_file
from models.gpt import size_of
from models.split_step import own_batch, split_step
from rich.console import Console
from rich.table import Table

from smp_tf.job import runtime
from smp_tf.steps import input_check, replica_check

WAYS = ("off", "on", "due")
SEED = 1
#: On the first ten steps batches are compared whatever the way, and on the second one weights.
FIRST = 11
#: One step in so many is due.
EVERY = 100


@contextlib.contextmanager
def traced_as(way: str) -> Iterator[None]:
    """Has a step traced to compare in that way, within its context."""
    running = runtime.current()
    every = 1 if way == "due" else 1 << 40
    config = dataclasses.replace(running.config, check_inputs=way != "off", check_replicas=way != "off")
    with contextlib.ExitStack() as stack:
        for module in (input_check, replica_check):
            stack.enter_context(mock.patch.object(module, "_EVERY", every))
        runtime.install(dataclasses.replace(running, config=config))
        stack.callback(runtime.install, running)
        yield


def main() -> None:
    """Measures, and prints on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium", help='of gpt.py, such as "small" or "medium+tied=0"')
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=new_file, help="write the times")
    args = parser.parse_args()
    size = named(size_of, args.size, "--size", parser)
    before = circumstances(args)
    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": SEED})
    if smp.size() == 1:
        parser.error("one process has nothing to compare: start two or more with horovodrun")
    batch = own_batch(size)
    steps = {way: split_step(size, tf_keras.optimizers.SGD(0.01)) for way in WAYS}
    for way, step in steps.items():
        with traced_as(way):
            for _ in range(FIRST):
                float(step(*batch))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(args.repetitions):
        # Each way is first as often as the others.
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            smp.barrier()
            began = time.perf_counter()
            float(steps[way](*batch))
            smp.barrier()
            seconds[way].append(time.perf_counter() - began)
    if smp.rank() == 0:
        report(args, before, seconds)


def report(args: argparse.Namespace, before: dict[str, Any], seconds: dict[str, list[float]]) -> None:
    """Prints a table, and writes the times."""
    table = Table("way", "ms a step", "over off", "quartiles")
    over = {way: [a / b for a, b in zip(times, seconds["off"], strict=True)] for way, times in seconds.items()}
    for way, times in seconds.items():
        low, _, high = statistics.quantiles(over[way], n=4)
        ratio = f"{statistics.median(over[way]):.3f}"
        table.add_row(way, f"{1e3 * statistics.median(times):.1f}", ratio, f"{low:.3f} to {high:.3f}")
    Console(width=100).print(table)
    on, due = statistics.median(over["on"]), statistics.median(over["due"])
    whole = ((EVERY - 1) * on + due) / EVERY
    print(
        f"of a training {whole - 1:+.1%}; {args.partitions} partitions, {smp.dp_size()} replicas, {args.microbatches} "
        f"microbatches, GPT {args.size}"
    )
    if args.json is not None:
        told = {**before, "replicas": smp.dp_size(), "seconds": seconds, "of_a_training": whole}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measures what a checkpoint costs a training that waits for it, and one that goes on meanwhile (`asynchronous`).

    horovodrun -np 2 python benchmarks/saving.py --partitions 2 --size medium+depth=8+batch=8 --json saving.json

trains a GPT with Adam. In each repetition the ways take turns, for as many steps each. Before the first of these

    none        nothing is saved
    waits       the training waits until a checkpoint is written
    goes on     a thread writes it; the last step is followed by a wait for it

"save" is the call alone. "steps" are the call, all steps and the wait. "over none" is the median of the ratios of the
repetitions, with its quartiles. Processor time is that of all ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import smp_tf as smp  # isort: split

import tensorflow as tf
import tf_keras
from harness.machine import circumstances
from harness.options import named, new_file
from models.gpt import build, size_of
from models.split_step import own_batch
from rich.console import Console
from rich.table import Table

from smp_tf.job.exchange import allgather_json, broadcast_json

WAYS = ("none", "waits", "goes on")
SEED = 1
#: Seconds of the call, seconds of the steps, and their processor time.
Times = tuple[float, float, float]


class Training:
    """A GPT that trains, with a manager for each way."""

    def __init__(self, size: Any, folder: str) -> None:
        self._model = build(smp.DistributedModel, size)
        optimizer = tf_keras.optimizers.Adam(1e-3)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(optimizer, loss)
        self._batch = own_batch(size)
        checkpoint = tf.train.Checkpoint(model=self._model, optimizer=optimizer)
        self._managers = {
            way: smp.CheckpointManager(checkpoint, f"{folder}/{way}", max_to_keep=1, asynchronous=way == "goes on")
            for way in WAYS[1:]
        }
        self._model.train_on_batch(*self._batch)

    def measured(self, way: str, steps: int) -> Times:
        """Returns the times of a way."""
        smp.barrier()
        began, worked = time.perf_counter(), time.process_time()
        manager = self._managers.get(way)
        if manager is not None:
            manager.save()
        saved = time.perf_counter()
        for _ in range(steps):
            self._model.train_on_batch(*self._batch)
        if manager is not None:
            manager.wait()
        smp.barrier()
        ended, work = time.perf_counter(), time.process_time() - worked
        return saved - began, ended - began, sum(allgather_json(work, name="the benchmark's times"))

    def bytes_of_weights_and_slots(self) -> int:
        """Returns the bytes that all ranks write."""
        own = sum(v.shape.num_elements() * v.dtype.size for v in self._model.local_variables)
        # Adam keeps two slots for each weight.
        return 3 * sum(allgather_json(own, name="the benchmark's bytes"))


def main() -> None:
    """Measures, and prints on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium+depth=8+batch=8", help='of gpt.py, such as "small"')
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="that follow a save")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=new_file, help="write the times")
    args = parser.parse_args()
    size = named(size_of, args.size, "--size", parser)
    before = circumstances(args)
    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": SEED})
    with tempfile.TemporaryDirectory(prefix="saving-") as own:
        training = Training(size, broadcast_json(own, 0, name="the benchmark's folder"))
        for way in WAYS:
            training.measured(way, args.steps)
        times: dict[str, list[Times]] = {way: [] for way in WAYS}
        for turn in range(args.repetitions):
            for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
                times[way].append(training.measured(way, args.steps))
        written = training.bytes_of_weights_and_slots()
        smp.barrier()
    if smp.rank() == 0:
        Console(width=100).print(table_of(times))
        mib = written / (1 << 20)
        print(f"{args.partitions} partitions, GPT {args.size}, {mib:.0f} MiB, {args.steps} steps a turn")
        if args.json is not None:
            Path(args.json).write_text(json.dumps({**before, "bytes": written, "seconds": times}, indent=1) + "\n")


def table_of(times: dict[str, list[Times]]) -> Table:
    """Returns a row for each way and each of its times."""
    table = Table("what", "way", "median, s", "over none", "quartiles")
    for place, what in enumerate(("save", "steps", "processors")):
        for way in WAYS if place else WAYS[1:]:
            found = [each[place] for each in times[way]]
            over, spread = "", ""
            if place:
                ratios = [a / b[place] for a, b in zip(found, times["none"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                over, spread = f"{middle:.2f}", f"{low:.2f} to {high:.2f}"
            table.add_row(what, way, f"{statistics.median(found):.3f}", over, spread)
    return table


if __name__ == "__main__":
    main()

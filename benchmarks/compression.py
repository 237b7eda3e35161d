r"""Measures what a step takes, and how much replicas send, with each `gradient_compression`.

    horovodrun -np 2 -H host1:1,host2:1 python benchmarks/compression.py --size medium --json compression.json

trains a GPT with Adam on replicas, which average over whatever network is between them. Where gradients take one bit,
it trains with OneBitAdam, after its warm-up. The ways take turns in the same processes, and every round traces each of
them anew. Seconds are medians, with the quartiles, of all rounds. Bytes are what left the host of rank 0 over the
interface that Horovod uses. On two hosts that are made of one machine, with a cable of 1 Gbit/s between them (as root):

    python -m tests.distributed.two_hosts --rate 1gbit horovodrun --gloo --disable-cache -np 2 \
        -H host-a:1,host-b:1 python benchmarks/compression.py --size medium --json compression.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import smp_tf as smp  # isort: split

import psutil
import tf_keras
from harness.machine import circumstances
from harness.options import new_file, some_of
from models.gpt import SIZES
from models.split_step import own_batch, split_step
from rich.console import Console
from rich.table import Table

WAYS = ("none", "bf16", "fp16", "1bit")
SEED = 1
#: Steps with whole gradients: the first is traced, and the second makes ready what TensorFlow and Horovod need.
WARMUP = 2


def optimizer_of(way: str) -> Any:
    """Returns the optimizer that a way trains with."""
    return smp.OneBitAdam(0.001, warmup_steps=WARMUP) if way == "1bit" else tf_keras.optimizers.Adam(0.001)


def sent() -> int:
    """Returns the bytes that have left this host over Horovod's interface."""
    return int(psutil.net_io_counters(pernic=True)[os.environ["HOROVOD_GLOO_IFACE"]].bytes_sent)


def measure(args: argparse.Namespace, way: str) -> tuple[list[float], float]:
    """Returns the seconds of each step of one round, and the bytes sent in each of them."""
    compression = None if way == "none" else way
    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": args.microbatches,
            "gradient_compression": compression,
            "check_replicas": False,
            "check_inputs": False,
            "seed": SEED,
        }
    )
    if smp.dp_size() == 1:
        raise SystemExit(f"one replica averages nothing: start {2 * args.partitions} processes, or a multiple of that")
    train_step = split_step(SIZES[args.size], optimizer_of(way))
    batch = own_batch(SIZES[args.size])
    # One more, since no step before it sends anything in one bit.
    for _ in range(WARMUP + 1):
        float(train_step(*batch))
    seconds = []
    smp.barrier()
    before = sent()
    for _ in range(args.steps):
        smp.barrier()
        began = time.perf_counter()
        float(train_step(*batch))
        smp.barrier()
        seconds.append(time.perf_counter() - began)
    bytes_sent = (sent() - before) / args.steps
    smp.shutdown()
    return seconds, bytes_sent


def main() -> None:
    """Measures, and prints on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--ways", type=some_of(WAYS, "ways"), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps of a round that are measured")
    parser.add_argument("--json", type=new_file, help="write the times and bytes")
    args = parser.parse_args()
    if "HOROVOD_GLOO_IFACE" not in os.environ:
        parser.error("start it with horovodrun, which says over which interface Horovod sends")
    is_first = os.environ["HOROVOD_RANK"] == "0"
    before = circumstances(args)
    seconds: dict[str, list[float]] = {way: [] for way in args.ways}
    bytes_sent: dict[str, list[float]] = {way: [] for way in args.ways}
    for _ in range(args.rounds):
        for way in args.ways:
            times, count = measure(args, way)
            seconds[way] += times
            bytes_sent[way].append(count)
    if is_first:
        report(args, before, seconds, bytes_sent)


def report(
    args: argparse.Namespace,
    before: dict[str, Any],
    seconds: dict[str, list[float]],
    bytes_sent: dict[str, list[float]],
) -> None:
    """Prints a table, and writes what was measured."""
    table = Table("gradient_compression", "ms a step", "quartiles", "MB sent a step")
    for way, times in seconds.items():
        low, median, high = statistics.quantiles(times, n=4)
        sent_mb = statistics.median(bytes_sent[way]) / 1e6
        table.add_row(way, f"{1e3 * median:.1f}", f"{1e3 * low:.1f} to {1e3 * high:.1f}", f"{sent_mb:.3f}")
    Console(width=100).print(table)
    if args.json is not None:
        told = {**before, "seconds": seconds, "bytes_sent": bytes_sent}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measures how long it takes to make a schedule for many stages, to check it and to simulate it.

    python benchmarks/schedule_time.py --stages 4,16,64,256 --microbatches 256 --json schedule.json

Every rank does all of it before its first step, and a search of plans does it for every plan that it tries. The model
is a chain: from each stage the activation goes to the next, and its gradient comes back. Most tasks of a real plan are
of this kind.

    order       what every rank computes when, by the schedule
    transfers   where the sends and receives go
    check       that each task is there once, and that no rank waits forever
    simulate    what would run when

The settings are measured in turn, and all again in every repetition. The table has medians. "grows as" is the exponent
from the first number of stages to the last. 1 is linear in the stages, and so in the number of tasks.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence

from harness.machine import circumstances
from harness.options import counts, new_file, some_of
from harness.report import exponent
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.transfers import add_transfers
from smp_tf.pipeline.schedules.schedule import SCHEDULES, build
from smp_tf.pipeline.task import Edge

PARTS = ("order", "transfers", "check", "simulate")


def chain(chunks: int) -> list[Edge]:
    """Returns the edges of a chain: each chunk needs what the one before makes, and gives the gradient back."""
    forward = [Edge(n, n, 0, n + 1, 0) for n in range(chunks - 1)]
    return [*forward, *(Edge(chunks - 1 + n, n + 1, 1, n, 1) for n in range(chunks - 1))]


def times_of(schedule: str, stages: int, microbatches: int) -> tuple[dict[str, float], int]:
    """Makes, checks and simulates one program.

    Args:
        schedule: name of the schedule.
        stages: number of stages of the pipeline.
        microbatches: microbatches of a step.

    Returns:
        Seconds by part, and the number of tasks.
    """
    gc.collect()
    marks = [time.perf_counter()]
    order = build(schedule, stages, microbatches)
    marks.append(time.perf_counter())
    edges = chain(order.chunks)
    program = add_transfers(order, edges)
    marks.append(time.perf_counter())
    check(program, edges)
    marks.append(time.perf_counter())
    timeline = simulate(program, edges=edges)
    marks.append(time.perf_counter())
    assert math.isfinite(timeline.step_time)
    seconds = {part: end - begin for part, (begin, end) in zip(PARTS, itertools.pairwise(marks), strict=True)}
    return seconds, sum(map(len, program.ranks))


def table_of(
    schedule: str, microbatches: int, measured: dict[int, dict[str, list[float]]], tasks: dict[int, int]
) -> Table:
    """Returns one line for each number of stages, and how the times grow."""
    table = Table(title=f"{schedule}, {microbatches} microbatches: seconds", title_justify="left")
    for name in ("stages", "tasks", *PARTS, "all", "µs per task"):
        table.add_column(name, justify="right")
    middles = {
        stages: {part: statistics.median(values) for part, values in parts.items()}
        for stages, parts in measured.items()
    }
    for stages, parts in middles.items():
        whole = sum(parts.values())
        cells = [f"{seconds:.2f}" for seconds in (*parts.values(), whole)]
        table.add_row(str(stages), f"{tasks[stages]:,}", *cells, f"{1e6 * whole / tasks[stages]:.0f}")
    first, last = min(middles), max(middles)
    if first != last:
        grows = [exponent((first, middles[first][part]), (last, middles[last][part])) for part in PARTS]
        whole = exponent((first, sum(middles[first].values())), (last, sum(middles[last].values())))
        more = exponent((first, tasks[first]), (last, tasks[last]))
        table.add_row("grows as", f"{more:.2f}", *(f"{power:.2f}" for power in (*grows, whole)), "")
    return table


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    schedules = some_of(SCHEDULES, "schedules")
    parser.add_argument(
        "--schedules", type=schedules, default="interleaved,zb_h1,zb_v", help=f"of {', '.join(SCHEDULES)}"
    )
    parser.add_argument("--stages", type=counts, default="4,16,64,256", help="default: 4,16,64,256")
    parser.add_argument("--microbatches", type=int, default=256, help="of a step (default: 256)")
    parser.add_argument("--repetitions", type=int, default=3, help="of every setting (default: 3)")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    given = parser.parse_args(words)
    if min(given.repetitions, given.microbatches) < 1:
        parser.error(f"one or more. Received: {given.repetitions} repetitions, {given.microbatches} microbatches")
    return given


def main() -> None:
    given = arguments()
    about = circumstances(given)
    measured: dict[str, dict[int, dict[str, list[float]]]] = {
        name: {stages: {part: [] for part in PARTS} for stages in given.stages} for name in given.schedules
    }
    tasks: dict[str, dict[int, int]] = {name: {} for name in given.schedules}
    turns = [(name, stages) for _ in range(given.repetitions) for name in given.schedules for stages in given.stages]
    with Progress(console=Console(stderr=True)) as progress:
        for name, stages in progress.track(turns, description="schedules"):
            seconds, tasks[name][stages] = times_of(name, stages, given.microbatches)
            for part, value in seconds.items():
                measured[name][stages][part].append(value)
    console = Console(width=max(100, Console().width))
    for name in given.schedules:
        console.print(table_of(name, given.microbatches, measured[name], tasks[name]))
    if given.json:
        found = {**about, "microbatches": given.microbatches, "tasks": tasks, "seconds": measured}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

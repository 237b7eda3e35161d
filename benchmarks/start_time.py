"""Measures how long the first step of a GPT takes, and how that grows with layers, microbatches and partitions.

    python benchmarks/start_time.py --axes layers,microbatches,partitions --json out.json

Every point is measured in processes of its own, one point after the other, and all again in every repetition. So what
slows the machine for a while slows several points a little. What does not grow is 8 layers, 8 microbatches and 2
partitions. The first step is the time from the first call of the training function to its loss. What comes before it
(imports, smp.init) is not in it:

    trace    the step, for one microbatch
    plan     placing, agreeing, cutting
    build    this rank's functions, its initial weights
    graph    writing the program and the optimizer into the training function
    run      the first execution, TensorFlow's passes over the graph included

Of several ranks the slowest counts. "against plain" is the median ratio to plain Keras with the same model, in one
process and with the whole batch at once. Plain Keras is measured once a repetition. "grows as" is the exponent from the
first point to the last: 1 is linear, 0 is no growth. "a step" is the median of the steps that follow.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.fleet import Crew, TrainerError
from harness.machine import circumstances
from harness.options import counts, new_file, some_of
from harness.report import exponent
from models.gpt import size_of
from rich.console import Console
from rich.table import Table

PARTS = {"trace": "trace", "plan": "plan", "build": "build", "graph": "graph", "run": "first execution"}
#: What grows, and what it grows to by default.
AXES = {"layers": "6,12,24,48,96", "microbatches": "1,2,4,8,16,32,64,128", "partitions": "1,2,4,8"}
#: What does not grow.
OTHERS = {"layers": 8, "microbatches": 8, "partitions": 2}
#: Number of steps that are timed after the first, one by one.
STEPS = 9


@dataclass(frozen=True)
class Point:
    """A setting whose start is measured.

    Args:
        layers: number of blocks of the GPT.
        microbatches: parts of a batch.
        partitions: number of processes.
    """

    layers: int
    microbatches: int
    partitions: int


@dataclass(frozen=True)
class Start:
    """What one start took, in seconds.

    Args:
        parts: parts of the first step by name, on the slowest rank.
        plain: the first step of plain Keras.
        step: median of the steps that follow.
    """

    parts: dict[str, float]
    plain: float
    step: float

    @property
    def first(self) -> float:
        """The seconds of the first step."""
        return sum(self.parts.values())

    @property
    def of_plain(self) -> float:
        """The ratio of the first step to plain Keras's."""
        return self.first / self.plain


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--axes", type=some_of(AXES, "axes"), default=",".join(AXES), help=f"what grows, of {', '.join(AXES)}"
    )
    for axis, values in AXES.items():
        parser.add_argument(f"--{axis}", type=counts, default=counts(values), help=f"default: {values}")
    parser.add_argument("--size", default="tiny", help="of the GPT, but for its layers and its batch")
    parser.add_argument("--repetitions", type=int, default=3, help="of every point")
    parser.add_argument("--threads", type=int, default=1, help="per operation of every process")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for one answer")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    given = parser.parse_args(words)
    if given.repetitions < 1:
        parser.error(f"every point is measured once or more often. Received: {given.repetitions}")
    if any(given.microbatches[-1] % number for number in (*given.microbatches, OTHERS["microbatches"])):
        parser.error(
            f"the batch has as many samples as the most microbatches; all numbers of microbatches, and "
            f"{OTHERS['microbatches']}, have to divide it. Received: {given.microbatches}"
        )
    try:
        size_of(given.size)
    except ValueError as error:
        parser.error(str(error))
    return given


def points(given: argparse.Namespace, axis: str) -> list[Point]:
    """Returns the points of an axis."""
    return [Point(**{**OTHERS, axis: value}) for value in getattr(given, axis)]


def first_step(
    way: str, size: str, microbatches: int, processes: int, given: argparse.Namespace, *, steps: int
) -> tuple[dict[str, float], float]:
    """Starts processes that have the machine to themselves.

    Args:
        way: as `trainer.py` takes it.
        size: size of the GPT.
        microbatches: parts of a batch.
        processes: number of processes.
        given: options of the benchmark.
        steps: number of further steps to run.

    Returns:
        Seconds of the parts of the first step on the slowest process, and of a step that follows (NaN for none).
    """
    config = json.dumps({"optimize": "memory", "xla": False, "policy": "float32"})
    with Crew(way, [size, str(microbatches), str(given.threads), config], processes, given.patience) as crew:
        slowest = max(crew.ask("prepare"), key=lambda answer: sum(answer["seconds"].values()))
        turns = [crew.ask("steps", count=1) for _ in range(steps)]
    later = [max(one["ended"] for one in turn) - min(one["began"] for one in turn) for turn in turns]
    return slowest["seconds"], statistics.median(later) if later else math.nan


def middle(starts: Sequence[Start]) -> Start:
    """Returns the start whose first step is the median, or the shorter of the two in the middle."""
    return sorted(starts, key=lambda start: start.first)[(len(starts) - 1) // 2]


def table_of(axis: str, measured: dict[int, list[Start]], about: str) -> Table:
    """Returns one line a point, and how the first step grows from the first point to the last."""
    table = Table(title=about, title_justify="left")
    for name in (axis, *PARTS, "first step, s", "lowest – highest", "against plain", "a step, ms"):
        table.add_column(name, justify="right")
    for value, starts in measured.items():
        chosen = middle(starts)
        firsts = [start.first for start in starts]
        table.add_row(
            str(value),
            *(f"{seconds:.2f}" for seconds in chosen.parts.values()),
            f"{chosen.first:.2f}",
            f"{min(firsts):.2f} – {max(firsts):.2f}",
            f"{statistics.median(start.of_plain for start in starts):.2f}",
            f"{1e3 * chosen.step:.1f}",
        )
    middles = {value: middle(starts) for value, starts in measured.items()}
    if len(middles) > 1:
        first, last = min(middles), max(middles)
        grows = [
            exponent((first, of(middles[first])), (last, of(middles[last])))
            for of in (*(lambda start, part=part: start.parts[part] for part in PARTS), lambda start: start.first)
        ]
        table.add_row("grows as", *(f"{power:.2f}" for power in grows), "", "", "")
    return table


def run(given: argparse.Namespace, axis: str, say: Callable[[str], None]) -> dict[int, list[Start]]:
    """Measures all points of an axis, again and again."""
    found: dict[int, list[Start]] = {getattr(point, axis): [] for point in points(given, axis)}
    for repetition in range(given.repetitions):
        plain: dict[str, float] = {}
        for point in points(given, axis):
            say(f"{axis}, repetition {repetition + 1} of {given.repetitions}: {point}")
            # All have the same batch, so that more microbatches are smaller.
            size = f"{given.size}+depth={point.layers}+batch={given.microbatches[-1]}"
            if size not in plain:
                plain[size] = sum(first_step("a", size, 1, 1, given, steps=0)[0].values())
            seconds, step = first_step("c", size, point.microbatches, point.partitions, given, steps=STEPS)
            parts = {part: seconds[name] for part, name in PARTS.items()}
            found[getattr(point, axis)].append(Start(parts, plain[size], step))
    return found


def title(given: argparse.Namespace, axis: str) -> str:
    """Returns what is in the table of an axis."""
    others = ", ".join(f"{value} {name}" for name, value in OTHERS.items() if name != axis)
    return f"First step by {axis}: GPT {given.size}, {given.microbatches[-1]} samples, {others}, balanced by memory"


def main() -> None:
    given = arguments()
    progress, console = Console(stderr=True), Console(width=max(120, Console().width))
    result: dict[str, Any] = {
        **circumstances(given),
        "settings": {
            "size": given.size,
            "batch": given.microbatches[-1],
            "threads": given.threads,
            "repetitions": given.repetitions,
            "others": OTHERS,
            "optimize": "memory",
        },
        "starts": {},
    }
    for axis in given.axes:
        try:
            measured = run(given, axis, lambda text: progress.print(text))
        except TrainerError as error:
            raise SystemExit(f"start_time: {error}") from None
        console.print(table_of(axis, measured, title(given, axis)))
        result["starts"][axis] = {value: [asdict(start) for start in starts] for value, starts in measured.items()}
        result["machine"]["load_after"] = os.getloadavg()[0]
        # After every axis: the next one may take an hour, or fail.
        if given.json:
            given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

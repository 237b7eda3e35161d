"""Compares the number of microbatches that the planner proposes with the step times of all numbers.

    python benchmarks/microbatches.py --size small --microbatches 1,2,4,8,16,32 --json out.json

With more microbatches the ranks of a pipeline wait less, and each microbatch costs something besides its samples. One
process measures microbatches of a few sizes (--profiled), as `smp-tf profile` does. From these the planner forecasts a
step for every number, as `smp-tf plan --microbatches auto --optimize speed --pipeline interleaved` does. Then pipelines
with every number train, in turns of about --turn seconds, the others asleep, forwards and backwards through the
numbers. Their layers are placed by estimates, as in a training without `model.profile`. The forecast places the layers
by their measured times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smp_tf.config.config import Config  # isort: split

import tensorflow as tf
import tf_keras
from harness.fleet import Crew, TrainerError, there_and_back
from harness.machine import circumstances
from harness.options import counts, new_file
from harness.report import paired, spread, with_quartiles
from models.sizes import model_of, size_of
from rich.console import Console
from rich.table import Table
from step_time import require_same_loss, take_turn

from smp_tf.model.profiling import measure
from smp_tf.offline.plan import OfflineModel, offline
from smp_tf.offline.search import Choices, search
from smp_tf.pipeline.planner.cut import cut_into_units
from smp_tf.pipeline.planner.times_by_size import Times, times_for


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", help='of gpt.py or conv_net.py, such as "small" or "conv+depth=8"')
    parser.add_argument(
        "--microbatches", type=counts, help="numbers to compare (default: powers of two, to 32 or the batch)"
    )
    parser.add_argument(
        "--profiled", type=counts, help="numbers whose microbatches are measured (default: 1, 4 and the batch)"
    )
    parser.add_argument("--partitions", type=int, default=2, help="ranks of the pipeline")
    parser.add_argument("--pipeline", default="interleaved", help="schedule")
    parser.add_argument("--repetitions", type=int, default=7, help="turns of every number")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of all ranks together (default: cores)"
    )
    parser.add_argument("--turn", type=float, default=1.0, help="seconds of a turn, about")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one answer")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    given = parser.parse_args(words)
    try:
        batch = size_of(given.size).batch
    except ValueError as error:
        parser.error(f"--size: {error}")
    given.microbatches = given.microbatches or [count for count in (1, 2, 4, 8, 16, 32) if count <= batch]
    given.profiled = given.profiled or sorted({1, min(4, batch), batch})
    for name in ("microbatches", "profiled"):
        if (numbers := getattr(given, name))[-1] > batch:
            parser.error(f"--{name} are from 1 to {batch}, the samples of a batch. Received: {numbers}")
    if len({-(-batch // count) for count in given.profiled}) < 2:
        parser.error(
            f"--profiled are numbers that give microbatches of two sizes or more: one size says nothing of another. "
            f"Received: {given.profiled}, for a batch of {batch}"
        )
    return given


def threads_of_rank(given: argparse.Namespace) -> int:
    """Returns the threads per operation of every rank, and of the process that measures layers for the planner."""
    return max(1, int(given.threads) // int(given.partitions))


def foreseen(given: argparse.Namespace, say: Callable[[str], None]) -> tuple[dict[int, float], int]:
    """Returns what was foreseen next to what was measured."""
    tf.config.threading.set_intra_op_parallelism_threads(threads_of_rank(given))
    size = size_of(given.size)
    measured: dict[int, Times] = {}

    def example() -> Any:
        inputs, _ = model_of(size).batch_of(size)
        return model_of(size).build(tf_keras.Model, size), inputs, lambda outputs: tf.reduce_mean(tf.square(outputs))

    with offline():
        model = OfflineModel(example, times=lambda model, samples: times_for(samples, measured))
        for count in given.profiled:
            made = model.trace(count)
            if made.samples in measured:
                continue
            say(f"measuring the layers of a microbatch of {made.samples}")
            units, cut = cut_into_units(made.graph)
            layers = measure(made.model, made.traced, units, cut, made.tensors, made.samples)
            if layers.failed:
                raise SystemExit(f"microbatches: layers could not be measured: {layers.failed}")
            measured[made.samples] = layers.times
        found = search(
            model,
            Config(partitions=given.partitions, optimize="speed"),
            given.partitions,
            Choices((given.partitions,), given.microbatches, (given.pipeline,)),
        )
    seconds = {c.config.microbatches: size.batch / c.speed for c in found.candidates if c.fits}
    return seconds, found.best.config.microbatches


def swept(given: argparse.Namespace, say: Callable[[str], None]) -> dict[int, list[float]]:
    """Returns the seconds of a step in every repetition, for every number of microbatches."""
    config = {"optimize": "speed", "pipeline": given.pipeline, "xla": False, "policy": "float32"}
    with contextlib.ExitStack() as stack:
        crews: dict[int, Crew] = {}
        for count in given.microbatches:
            say(f"starting {given.partitions} ranks with {count} microbatches")
            asked = [given.size, str(count), str(threads_of_rank(given)), json.dumps(config)]
            crews[count] = stack.enter_context(Crew("c", asked, given.partitions, given.patience))
            crews[count].ask("prepare")
        warm = {count: take_turn(crew, [], 2) for count, crew in crews.items()}
        if not model_of(size_of(given.size)).MIXES_SAMPLES:
            require_same_loss({str(count): turn["loss"] for count, turn in warm.items()}, "float32")
        steps = {count: max(1, round(given.turn / turn["seconds"])) for count, turn in warm.items()}
        turns: dict[int, list[float]] = {count: [] for count in crews}
        for repetition, order in there_and_back(crews, given.repetitions):
            say(f"repetition {repetition + 1} of {given.repetitions}")
            for count in order:
                others = [crew for other, crew in crews.items() if other != count]
                turns[count].append(take_turn(crews[count], others, steps[count])["seconds"])
    return turns


def table_of(found: Mapping[str, Any], about: str) -> Table:
    """Returns what was foreseen next to what was measured, each as a multiple of its shortest."""
    shown = Table(title=about, title_justify="left")
    for name in ("microbatches", "foreseen ms", "of its shortest", "measured ms", "of the taken one's", ""):
        shown.add_column(name, justify="right" if name else "left", no_wrap=True)
    least = min(row["foreseen"] for row in found["rows"])
    for row in found["rows"]:
        marks = ["proposed"] if row["microbatches"] == found["proposed"] else []
        marks += ["measured best"] if row["microbatches"] == found["best"] else []
        shown.add_row(
            str(row["microbatches"]),
            f"{1e3 * row['foreseen']:,.1f}",
            f"{row['foreseen'] / least:.2f}",
            with_quartiles(row["seconds"], 1, 1e3),
            with_quartiles(row["over_taken"]),
            ", ".join(marks),
        )
    return shown


def main() -> None:
    given = arguments()
    progress = Console(stderr=True)
    before = circumstances(given)
    try:
        seconds, proposed = foreseen(given, progress.print)
        turns = swept(given, progress.print)
    except TrainerError as error:
        raise SystemExit(f"microbatches: {error}") from None
    found = {
        **before,
        "proposed": proposed,
        "best": min(turns, key=lambda count: spread(turns[count])["median"]),
        "rows": [
            {
                "microbatches": count,
                "foreseen": seconds[count],
                "seconds": spread(turns[count]),
                "over_taken": paired(turns[count], turns[proposed]),
            }
            for count in given.microbatches
        ],
    }
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    about = (
        f"{given.size}, {given.partitions} partitions, {given.pipeline}; layers measured of "
        f"{', '.join(map(str, given.profiled))} microbatches; {given.repetitions} repetitions"
    )
    Console(width=max(140, Console().width)).print(table_of(found, about))


if __name__ == "__main__":
    main()

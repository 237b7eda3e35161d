"""Measures how close a pipeline's step comes to its bounds, and where the rest goes.

    python benchmarks/bound.py --sizes large+batch=16,conv --microbatches 2,4,8,16 --json bound.json

    (1) one process, the same microbatches accumulated   plain Keras, one thread
    (n) one process, the same microbatches accumulated   plain Keras, all threads
    (p) a pipeline of --partitions ranks                 smp_tf, the threads shared out, by --schedule
    (z) the same by --zero-bubble                        for the numbers of microbatches of --zero-bubble-at
    (o) as (p), one operation at once
    (s) as (o), every microbatch there and back before the next one: what (1) is to be compared with

For every number of microbatches the processes of all ways are started once. Then they take turns, the others asleep,
forwards and backwards through the ways. Ratios are of pairs within a repetition. All turns of a pipeline are recorded
(`smp.timeline`), which gives the times of the tasks of each step. With these

    simulated   is what the schedule takes when messages are free and every task begins as soon as it can,
    bound       is what no schedule of these tasks beats (`smp_tf.pipeline.programs.simulate.lower_bound`),

and both stand next to the step of the same turn. A step lasts from one call to the next, the optimizer and what Python
does included. "first task to last" is without these. Tasks take longer while other ranks compute. So "work alone" is
the time of all tasks of all ranks of (s), where only one computes at a time. Its unit is a step of (1).

One more run compares smp_tf without partitions and microbatches with plain Keras. The batch is whole.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.fleet import HERE, Crew, TrainerError, there_and_back
from harness.machine import circumstances
from harness.options import counts, new_file
from harness.report import paired, spread, with_quartiles
from models.sizes import size_of
from rich.console import Console
from rich.table import Table
from step_time import require_same_loss, take_turn
from versus.report import chunk_times

sys.path.append(str(HERE.parent))
from smp_tf.offline.timeline_text import WORDS, replicas_of
from smp_tf.pipeline.measure.step_anatomy import PARTS, StepAnatomy
from smp_tf.pipeline.programs.simulate import lower_bound
from smp_tf.pipeline.task import Kind
from smp_tf.recording import timeline_file

#: What plain Keras does with one thread and with all threads, and pipelines.
ONE, ALL, PIPELINE, ZERO_BUBBLE, ONE_AT_ONCE, SERIAL = "1", "n", "p", "z", "o", "s"

#: What the timelines of a turn say, besides the shares of the time.
SEEN = ("over_simulated", "over_bound", "tasks_over_simulated", "simulated_bubble", "task_seconds", "work_seconds")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="large+batch=16,conv", help="of gpt.py and conv_net.py, between commas")
    parser.add_argument("--microbatches", type=counts, default="2,4,8,16", help="numbers to measure")
    parser.add_argument("--partitions", type=int, default=2, help="ranks of the pipelines")
    parser.add_argument("--schedule", default="interleaved", help="of (p)")
    parser.add_argument("--zero-bubble", default="zb_h1", help="schedule of (z)")
    parser.add_argument("--zero-bubble-at", type=counts, default="8", help="numbers of microbatches with a (z)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of (n), and of all ranks (default: cores)"
    )
    parser.add_argument(
        "--both-cores", action="store_true", help="only (n) and pipelines; the others take as long as all these"
    )
    parser.add_argument("--repetitions", type=int, default=15, help="turns of every way")
    parser.add_argument("--turn", type=float, default=1.0, help="seconds of a turn, about")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one answer")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    given = parser.parse_args(words)
    given.sizes = given.sizes.split(",")
    for name in given.sizes:
        try:
            batch = size_of(name).batch
        except ValueError as error:
            parser.error(str(error))
        if any(batch % count for count in given.microbatches):
            parser.error(
                f"the batch of {name} has {batch} samples, and every number of microbatches has to divide it. "
                f"Received: {', '.join(map(str, given.microbatches))}"
            )
    if given.repetitions < 1 or given.partitions < 2:
        parser.error("every way takes one turn or more, and a pipeline has two ranks or more")
    return given


def steps_in(folder: str) -> list[StepAnatomy]:
    """Returns the steps that all ranks of a pipeline have recorded into a folder."""
    [replica] = replicas_of(timeline_file.read([Path(folder)]))
    return [step for step in replica.steps.values() if step.is_whole]


def tasks_in(steps: Sequence[StepAnatomy]) -> Iterator[tuple[str, int, float]]:
    """Yields the kind, chunk and seconds of all tasks that ran in some steps."""
    for stage in chain.from_iterable(step.stages for step in steps):
        for run in stage.compute if stage is not None else ():
            yield run.task.kind.word, run.task.chunk, (run.end - run.begin) / 1e9


def seen(steps: Sequence[StepAnatomy], seconds: float, microbatches: int) -> dict[str, Any]:
    """Returns what the timelines of a turn say.

    Args:
        steps: steps of the turn.
        seconds: mean time of a step of the turn.
        microbatches: microbatches of a step.

    Returns:
        Ratios, and the share of the ranks' time that went into each of `PARTS`.
    """
    planned = steps[0].program.planned
    # The mean, since a step takes the sum of its tasks.
    times = chunk_times(tasks_in(steps), planned.chunks, fmean)
    cut = any(task.kind is Kind.W for tasks in planned.ranks for task in tasks)
    bound = lower_bound(times, microbatches, placement=planned.placement(), split_backward=cut)
    as_planned = [step.simulated() for step in steps]
    simulated = fmean(timeline.step_time / 1e9 for timeline in as_planned)
    pipeline = fmean((step.span[1] - step.span[0]) / 1e9 for step in steps)
    spent = [step.time_spent(stage) for step in steps for stage in range(planned.stages)]
    own = [stage for step in steps for stage in step.stages if stage is not None]
    whole = planned.stages * (max(stage.until for stage in own) - min(stage.begin for stage in own))
    parts = {part: sum(each[part] for each in spent) / whole for part in PARTS}
    # A rank may be done with the last step before another. It then waits, as it does when a step follows.
    parts["bubble"] += 1.0 - sum(parts.values())
    return {
        "over_simulated": seconds / simulated,
        "over_bound": seconds / bound,
        "tasks_over_simulated": pipeline / simulated,
        "simulated_bubble": fmean(timeline.bubble_ratio for timeline in as_planned),
        "task_seconds": min(min(each.forward, each.backward) for each in times),
        "work_seconds": sum(duration for *_, duration in tasks_in(steps)) / len(steps),
        "parts": parts,
    }


def recorded_turn(crew: Crew, steps: int, microbatches: int) -> dict[str, Any]:
    """Lets a pipeline run some steps; returns seconds of a step, and what `seen` tells."""
    with tempfile.TemporaryDirectory() as folder:
        answers = crew.ask("recorded_steps", count=steps, folder=folder)
        recorded = steps_in(folder)
    began, ended = min(told["began"] for told in answers), max(told["ended"] for told in answers)
    return {"seconds": (ended - began) / steps, "seen": seen(recorded, (ended - began) / steps, microbatches)}


def serial_schedule(partitions: int, microbatches: int) -> str:
    """Returns the text of a schedule in which no two ranks ever compute at once."""
    there_and_back = [
        " ".join(f"{rank}F{each} {rank}B{each}" for each in range(microbatches)) for rank in range(partitions)
    ]
    return "\n".join(there_and_back) + "\n"


def crew_of(given: argparse.Namespace, way: str, size: str, microbatches: int, folder: Path) -> Crew:
    """Starts the processes of a way, and writes what they read into a folder."""
    schedule = {ZERO_BUBBLE: given.zero_bubble, SERIAL: str(folder / "serial.txt")}.get(way, given.schedule)
    if way == SERIAL:
        Path(schedule).write_text(serial_schedule(given.partitions, microbatches))
    told: dict[str, Any] = {"optimize": "speed", "pipeline": schedule, "xla": False, "policy": "float32"}
    if way in (ONE, ALL):
        threads = given.threads if way == ALL else 1
        config = json.dumps({**told, "inter_op_threads": threads})
        return Crew("b", [size, str(microbatches), str(threads), config], 1, given.patience)
    if way in (ONE_AT_ONCE, SERIAL):
        told["inter_op_threads"] = 1
    config = json.dumps(told)
    threads = max(1, given.threads // given.partitions)
    return Crew("c", [size, str(microbatches), str(threads), config], given.partitions, given.patience)


def memory_beyond_imports(crew: Crew) -> list[int]:
    """Returns the bytes that each process had at most, beyond those before there was a model."""
    return [told["resident_peak"] - told["resident_before_model"] for told in crew.ask("memory")]


def measure(given: argparse.Namespace, size: str, microbatches: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures one number of microbatches."""
    ways = [ALL, PIPELINE, *([ZERO_BUBBLE] if microbatches in given.zero_bubble_at else [])]
    if not given.both_cores:
        ways = [ONE, *ways, ONE_AT_ONCE, SERIAL]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        crews = {}
        for way in ways:
            say(f"{size}, {microbatches} microbatches: starting ({way})")
            crews[way] = stack.enter_context(crew_of(given, way, size, microbatches, folder))
            crews[way].ask("prepare")
        warm = {way: take_turn(crew, [], 2) for way, crew in crews.items()}
        require_same_loss({way: turn["loss"] for way, turn in warm.items()}, "float32")
        memory = {way: memory_beyond_imports(crew) for way, crew in crews.items()}
        steps = max(1, round(given.turn / warm[PIPELINE]["seconds"]))
        turns: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for repetition, order in there_and_back(ways, given.repetitions):
            say(f"{size}, {microbatches} microbatches: repetition {repetition + 1} of {given.repetitions}")
            for way in order:
                if way in (ONE, ALL):
                    others = [crew for other, crew in crews.items() if other != way]
                    turns[way].append(take_turn(crews[way], others, steps))
                else:
                    turns[way].append(recorded_turn(crews[way], steps, microbatches))
    return figures(turns, memory)


def figures(turns: dict[str, list[dict[str, Any]]], memory: dict[str, list[int]]) -> dict[str, Any]:
    """Returns the figures of a number of microbatches.

    Args:
        turns: turns of every way, one for each repetition.
        memory: bytes of each process by way.
    """
    seconds = {way: [turn["seconds"] for turn in told] for way, told in turns.items()}
    schedules = [way for way in turns if way not in (ONE, ALL)]
    work = [turn["seen"]["work_seconds"] for turn in turns.get(SERIAL, ())]
    return {
        "seconds": {way: spread(told) for way, told in seconds.items()},
        "speed": {way: paired(seconds[ALL], seconds[way]) for way in schedules},
        **({"work_over_one_thread": paired(work, seconds[ONE])} if work else {}),
        "seen": {
            way: {
                **{name: spread([turn["seen"][name] for turn in turns[way]]) for name in SEEN},
                "parts": {part: spread([turn["seen"]["parts"][part] for turn in turns[way]]) for part in PARTS},
            }
            for way in schedules
        },
        "memory": memory,
        "memory_over_all_threads": {
            way: [sum(memory[way]) / len(memory[way]) / memory[ALL][0], max(memory[way]) / memory[ALL][0]]
            for way in schedules
        },
    }


def without_partitions(given: argparse.Namespace, size: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Compares smp_tf with one partition and one microbatch with plain Keras."""
    config = json.dumps({"optimize": "speed", "pipeline": given.schedule, "xla": False, "policy": "float32"})
    with contextlib.ExitStack() as stack:
        crews = {}
        for way in "ac":
            say(f"{size}, one process and the batch whole: starting {'smp_tf' if way == 'c' else 'plain Keras'}")
            crews[way] = stack.enter_context(Crew(way, [size, "1", str(given.threads), config], 1, given.patience))
            crews[way].ask("prepare")
        warm = {way: take_turn(crew, [], 2) for way, crew in crews.items()}
        require_same_loss({way: turn["loss"] for way, turn in warm.items()}, "float32")
        steps = max(1, round(given.turn / warm["a"]["seconds"]))
        turns: dict[str, list[float]] = {way: [] for way in crews}
        for repetition, order in there_and_back(crews, given.repetitions):
            say(f"{size}, one process and the batch whole: repetition {repetition + 1} of {given.repetitions}")
            for way in order:
                turns[way].append(take_turn(crews[way], [], steps)["seconds"])
    return {
        "seconds": {"keras": spread(turns["a"]), "smp_tf": spread(turns["c"])},
        "ratio": paired(turns["c"], turns["a"]),
    }


def tables_of(size: str, found: dict[int, dict[str, Any]]) -> list[Table]:
    """Returns what was measured of a size, by number of microbatches."""
    steps = Table(title=f"{size}: medians with quartiles", title_justify="left")
    for name in ("m", "way", "step, ms", "/ simulated", "first task to last", "/ bound", "speed / (n)", "memory / (n)"):
        steps.add_column(name, justify="right")
    rest = Table(
        title=f"{size}: where the time of the ranks goes, in percent; work alone over (1)", title_justify="left"
    )
    for name in ("m", "way", *(WORDS[part] for part in PARTS), "planned bubble", "shortest task, ms", "work alone"):
        rest.add_column(name, justify="right")
    for count, told in found.items():
        for way, seconds in told["seconds"].items():
            row = [
                str(count) if way == next(iter(told["seconds"])) else "",
                f"({way})",
                with_quartiles(seconds, 0, 1e3),
            ]
            if way in told["seen"]:
                saw = told["seen"][way]
                row += [with_quartiles(saw[name]) for name in ("over_simulated", "tasks_over_simulated", "over_bound")]
                mean, most = told["memory_over_all_threads"][way]
                row += [with_quartiles(told["speed"][way]), f"mean {mean:.2f}, most {most:.2f}"]
                rest.add_row(
                    str(count),
                    f"({way})",
                    *(f"{100 * saw['parts'][part]['median']:.1f}" for part in PARTS),
                    f"{100 * saw['simulated_bubble']['median']:.1f}",
                    f"{1e3 * saw['task_seconds']['median']:,.0f}",
                    with_quartiles(told["work_over_one_thread"]) if way == SERIAL else "",
                )
            steps.add_row(*row)
        steps.add_section()
    return [steps, rest]


def main() -> None:
    given = arguments()
    progress, console = Console(stderr=True), Console(width=max(150, Console().width))
    result: dict[str, Any] = {
        **circumstances(given),
        "sizes": {},
        "without_partitions": {},
    }
    for size in given.sizes:
        try:
            found = {count: measure(given, size, count, progress.print) for count in given.microbatches}
            whole = None if given.both_cores else without_partitions(given, size, progress.print)
        except TrainerError as error:
            raise SystemExit(f"bound: {error}") from None
        result["sizes"][size] = found
        if whole is not None:
            result["without_partitions"][size] = whole
        result["machine"]["load_after"] = os.getloadavg()[0]
        # After every size: the next one may take an hour, or fail.
        if given.json:
            given.json.write_text(json.dumps(result, indent=1) + "\n")
        for table in tables_of(size, found):
            console.print(table)
        if whole is not None:
            ratio, keras = with_quartiles(whole["ratio"], 3), with_quartiles(whole["seconds"]["keras"], 0, 1e3)
            console.print(
                f"{size}, one process, the batch whole: a step of smp_tf takes {ratio} of plain Keras's, {keras} ms"
            )


if __name__ == "__main__":
    main()

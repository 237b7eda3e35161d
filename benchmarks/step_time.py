"""Measures a training step of a GPT: in one process, accumulated in one process, and split.

    python benchmarks/step_time.py --sizes small,medium,large --json out.json

    (a) one process, the whole batch at once             plain Keras, all threads
    (b) one process, the same microbatches accumulated   plain Keras, all threads
    (c) a pipeline of --partitions ranks                 smp_tf, the threads shared out

The processes of all three are started once. Then they take turns of about --turn seconds, the others asleep: a b c,
stages, stages, c b a, and so on. So whatever slows the machine for a while slows all of them, and ratios within one
repetition are fair.

With --xla, XLA compiles forward and backward in all three, and the stages of (c) by `xla=True`. With --policy
mixed_bfloat16 all three compute in bfloat16, and (c) sends it.

The lower bound on a pipeline's step comes from the times of each stage's forward and backward segment, measured in the
same repetition. One bound is from times alone, with the other ranks asleep: no schedule could be faster. The other is
from times of all ranks at once. It includes what shared memory bandwidth and cores cost.

The parts of the first step are: start (imports, smp.init), trace (the step, for one microbatch), plan (placing,
agreeing, cutting), build (this rank's functions, its initial weights), graph (writing the program and the optimizer
into the training function; for (a) and (b) all of its tracing), and the first execution.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from harness.fleet import HERE, Crew, TrainerError, there_and_back
from harness.machine import circumstances
from harness.options import new_file, some_of
from harness.report import WAYS, print_tables, spread, summary
from rich.console import Console

sys.path.append(str(HERE.parent))
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.simulate import lower_bound

POLICIES = ("float32", "mixed_bfloat16")
NAMES = ("tiny", "small", "medium", "large")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        type=some_of(NAMES, "sizes"),
        default="small,medium,large",
        help=f"of the model, from {', '.join(NAMES)}",
    )
    parser.add_argument("--repetitions", type=int, default=7, help="turns of every way")
    parser.add_argument("--microbatches", type=int, default=8, help="parts a batch is cut into")
    parser.add_argument("--partitions", type=int, default=2, help="ranks of the pipeline")
    parser.add_argument(
        "--optimize",
        choices=("speed", "memory"),
        default="speed",
        help="what (c) balances its stages by (default: speed)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="threads per operation of (a) and (b); a rank of (c) has its share (default: cores)",
    )
    parser.add_argument("--xla", action="store_true", help="compile forward and backward with XLA, in all three ways")
    parser.add_argument("--policy", choices=POLICIES, default="float32", help="of Keras's mixed precision")
    parser.add_argument("--turn", type=float, default=1.0, help="seconds of a turn, about")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one answer")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    given = parser.parse_args()
    if given.repetitions < 1 or given.microbatches not in (1, 2, 4, 8):
        parser.error("repetitions are 1 or more; microbatches 1, 2, 4 or 8, which divide the batch")
    return given


def take_turn(crew: Crew, others: list[Crew], steps: int) -> dict[str, float]:
    """Lets one crew run some steps.

    Args:
        crew: the processes of one way.
        others: crews that sleep meanwhile.
        steps: number of steps.

    Returns:
        Seconds per step from the first rank's beginning to the last one's end, the last loss, and what the others'
        sleep costs: their processor time per second.
    """
    before = sum(other.cpu_seconds() for other in others)
    answers = crew.ask("steps", count=steps)
    used = sum(other.cpu_seconds() for other in others) - before
    began = min(answer["began"] for answer in answers)
    ended = max(answer["ended"] for answer in answers)
    return {
        "seconds": (ended - began) / steps,
        "loss": answers[0]["loss"],
        "others_cpu_share": used / (ended - began),
    }


def times_alone(crew: Crew, calls: int) -> list[dict[str, float]]:
    """Returns seconds of every stage's segments while the other ranks sleep."""
    return [crew.ask("segments", ranks=[member.rank], calls=calls)[0] for member in crew.members]


def stage_times(crew: Crew, calls: int) -> dict[str, list[dict[str, float]]]:
    """Returns seconds of every stage's segments, alone and with the others at work."""
    return {
        "alone": times_alone(crew, calls),
        "together": crew.ask("segments", calls=calls),
    }


def bound(times: list[dict[str, float]], microbatches: int, cores: int) -> float:
    """Returns the lower bound on a step of these stages, in seconds."""
    chunks = [ChunkTimes(each["forward"], each["backward"], 0.0) for each in times]
    return lower_bound(chunks, microbatches, cores=cores)


def measure(given: argparse.Namespace, size: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures one size of model, and returns its figures."""
    with contextlib.ExitStack() as stack:
        crews: dict[str, Crew] = {}
        first: dict[str, list[Any]] = {}
        for way in WAYS:
            processes = given.partitions if way == "c" else 1
            threads = max(1, given.threads // processes)
            say(f"{size}: starting ({way}), {processes} × {threads} threads")
            config = {"optimize": given.optimize, "xla": given.xla, "policy": given.policy}
            asked = [size, str(given.microbatches), str(threads), json.dumps(config)]
            crews[way] = stack.enter_context(Crew(way, asked, processes, given.patience))
            first[way] = crews[way].ask("prepare")
        require_same_loss({way: answers[0]["loss"] for way, answers in first.items()}, given.policy)
        return {
            "first_step_seconds": {
                way: [
                    {"start": member.start_seconds, **answer["seconds"]}
                    for member, answer in zip(crews[way].members, answers, strict=True)
                ]
                for way, answers in first.items()
            },
            **repeat(given, size, first["a"][0]["items"], crews, say),
        }


def repeat(
    given: argparse.Namespace,
    size: str,
    tokens: int,
    crews: dict[str, Crew],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Lets all crews take turns, and returns the figures of what they measured."""
    warm = {way: take_turn(crew, [], 2) for way, crew in crews.items()}
    require_same_loss({way: each["loss"] for way, each in warm.items()}, given.policy)
    memory = {way: crew.ask("memory") for way, crew in crews.items()}
    steps = max(1, round(given.turn / warm["b"]["seconds"]))
    calls = max(2, steps * given.microbatches // 4)
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in crews}
    stages = []
    for repetition, order in there_and_back(crews, given.repetitions):
        say(f"{size}: repetition {repetition + 1} of {given.repetitions}, {steps} steps a turn")
        for way in order:
            others = [other for name, other in crews.items() if name != way]
            turns[way].append(take_turn(crews[way], others, steps))
        stages.append(stage_times(crews["c"], calls))
    bounds = [
        {name: bound(times, given.microbatches, given.threads) for name, times in each.items()} for each in stages
    ]
    seconds = {way: [each["seconds"] for each in turns[way]] for way in turns}
    return {
        **summary({"tokens": tokens, "turns": seconds, "bounds": bounds}),
        "steps_per_turn": steps,
        "stage_seconds": {
            name: [
                {part: spread([e[name][rank][part] for e in stages]) for part in stages[0][name][rank]}
                for rank in range(given.partitions)
            ]
            for name in ("alone", "together")
        },
        "memory": memory,
        "last_loss": {way: turns[way][-1]["loss"] for way in turns},
        "others_cpu_share": {way: spread([each["others_cpu_share"] for each in turns[way]]) for way in turns},
    }


def require_same_loss(losses: dict[str, float], policy: str) -> None:
    """Ends the benchmark where a way does not compute the same as the first one."""
    # bfloat16 has two to three digits.
    tolerance = 1e-3 if policy == "float32" else 1e-2
    if max(losses.values()) - min(losses.values()) > tolerance * abs(next(iter(losses.values()))):
        raise SystemExit(f"all ways to train must give the same losses, but these differ: {losses}")


def main() -> None:
    given = arguments()
    progress = Console(stderr=True)
    result: dict[str, Any] = {
        **circumstances(given),
        "settings": {
            "microbatches": given.microbatches,
            "partitions": given.partitions,
            "repetitions": given.repetitions,
            "intra_op_threads": {
                "a": given.threads,
                "b": given.threads,
                "c": max(1, given.threads // given.partitions),
            },
            "schedule": "interleaved",
            "optimize": given.optimize,
            "optimizer": "Adam",
            "dtype": given.policy,
            "xla": given.xla,
        },
        "sizes": {},
    }
    try:
        for size in given.sizes:
            result["sizes"][size] = measure(given, size, lambda text: progress.print(text))
    except TrainerError as error:
        raise SystemExit(f"step_time: {error}") from None
    result["machine"]["load_after"] = os.getloadavg()[0]
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print_tables(result, Console(width=max(120, Console().width)))


if __name__ == "__main__":
    main()

"""The fractions of their bounds that smp_tf and torch.distributed.pipelining reach, and the table of them.

Needs no framework.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from harness.report import MIB, paired, spread, with_quartiles
from rich.table import Table

from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.simulate import lower_bound
from versus.settings import PAIRS, Pair

FRAMEWORKS = ("smp_tf", "torch")


def chunk_times(
    tasks: Iterable[Sequence[Any]], chunks: int, average: Callable[[Sequence[float]], float] = statistics.median
) -> list[ChunkTimes]:
    """Returns the times of every chunk's tasks.

    Args:
        tasks: a (kind, chunk, seconds) for each task. Kinds are F, B, I and W.
        chunks: number of chunks.
        average: takes the average over the tasks of one kind and chunk.

    Raises:
        ValueError: a chunk has no forward or no backward pass.
    """
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for kind, chunk, taken in tasks:
        seconds[chunk, kind].append(taken)
    each = {key: average(values) for key, values in seconds.items()}
    times = []
    for chunk in range(chunks):
        kinds = {kind for at, kind in each if at == chunk}
        if "F" not in kinds or not kinds & {"B", "W"}:
            raise ValueError(
                f"Every chunk has forward and backward passes. Received: of chunk {chunk}, {sorted(kinds) or 'no task'}"
            )
        # A backward pass in one piece counts as a gradient of weights. No other rank waits for it, so the bound holds.
        weights = each[chunk, "W"] if "W" in kinds else each[chunk, "B"]
        times.append(ChunkTimes(each[chunk, "F"], each.get((chunk, "I"), 0.0), weights))
    return times


def bounds(
    times: Sequence[ChunkTimes], serial: float, pair: Pair, microbatches: int, processes: int, cores: int
) -> dict[str, float]:
    """Returns two lower bounds on a step, in seconds.

    Args:
        times: times of the chunks' tasks in the pipeline.
        serial: seconds of the same framework's step in one process.
        pair: the schedule.
        microbatches: of a step.
        processes: number of ranks.
        cores: number of cores that all ranks have together.

    Returns:
        "serial" shares out the serial step's time among the tasks, as they share the time in the pipeline. "tasks"
        takes these times as they are.
    """
    placement = pair.placement(processes)
    scale = serial / (microbatches * sum(each.forward + each.backward for each in times))
    scaled = [
        ChunkTimes(scale * each.forward, scale * each.input_gradient, scale * each.weight_gradient) for each in times
    ]
    split = pair.splits_backward
    return {
        "serial": lower_bound(scaled, microbatches, placement=placement, split_backward=split, cores=cores),
        # The cores are left out. A task that waits for a core takes longer, so its time includes them already.
        "tasks": lower_bound(times, microbatches, placement=placement, split_backward=split),
    }


def figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of one schedule on so many processes.

    Args:
        measured: `schedule`, a key of `PAIRS`; `microbatches`, `processes`, `cores`, `steps` of a turn; and `turns`:
            per framework a list of repetitions, each with `serial` and `step` in seconds, and of the pipeline's ranks
            `cpu_seconds`, `resident_peak`, `resident_before_model`, `sent_bytes` of all steps of the turn, and `tasks`.

    Returns:
        The spreads of each framework, and `ahead`: smp_tf's fraction of its bound over torch's, repetition by
        repetition.
    """
    pair, steps = PAIRS[measured["schedule"]], measured["steps"]
    chunks = len(pair.placement(measured["processes"]))
    found: dict[str, Any] = {}
    for framework, turns in measured["turns"].items():
        bound = [
            bounds(
                chunk_times((task for rank in turn["ranks"] for task in rank["tasks"]), chunks),
                turn["serial"],
                pair,
                measured["microbatches"],
                measured["processes"],
                measured["cores"],
            )
            for turn in turns
        ]
        step, serial = ([turn[name] for turn in turns] for name in ("step", "serial"))
        by_rank = list(zip(*(turn["ranks"] for turn in turns), strict=True))
        found[framework] = {
            "serial_seconds": spread(serial),
            "step_seconds": spread(step),
            "speed_up": paired(serial, step),
            "of_bound": paired([each["serial"] for each in bound], step),
            "of_tasks_bound": paired([each["tasks"] for each in bound], step),
            "cores_used": spread(
                [sum(rank["cpu_seconds"] for rank in turn["ranks"]) / (steps * turn["step"]) for turn in turns]
            ),
            "resident_peak": [max(each["resident_peak"] for each in rank) for rank in by_rank],
            "beyond_start": [
                max(each["resident_peak"] - each["resident_before_model"] for each in rank) for rank in by_rank
            ],
            "sent_bytes": [statistics.median(each["sent_bytes"] for each in rank) / steps for rank in by_rank],
        }
    return {**found, "ahead": paired(found["smp_tf"]["of_bound"]["all"], found["torch"]["of_bound"]["all"])}


def _ahead(value: Mapping[str, Any]) -> str:
    if value["median"] >= 1.0:
        return f"smp_tf {with_quartiles(value)}"
    low, high = value["quartiles"]
    turned = {"median": 1 / value["median"], "quartiles": [1 / high, 1 / low]}
    return f"torch {with_quartiles(turned)}"


def _mib(counts: Iterable[float]) -> str:
    return ", ".join(f"{count / MIB:,.0f}" for count in counts)


def table_of(size: str, results: Sequence[Mapping[str, Any]], serial_memory: Mapping[str, int]) -> Table:
    """Returns the table of one size of model: two rows for each schedule on so many processes.

    Args:
        size: size of the model.
        results: `processes`, `schedule` and what `figures` returns, each.
        serial_memory: most bytes beyond the start that the process of each framework had.
    """
    table = Table(
        title=f"{size}: medians (quartiles). Fraction of own bound: lower bound of the framework's own serial work "
        f"over the step; of the tasks' bound: the same with tasks as long as they were in the pipeline. Memory is "
        f"resident, beyond what a process had before its model; one process: smp_tf's Keras "
        f"{_mib([serial_memory['smp_tf']])}, torch {_mib([serial_memory['torch']])} MiB",
        title_justify="left",
    )
    columns = ("P", "schedule", "", "serial, ms", "step, ms", "speed-up", "of own bound", "of tasks' bound")
    for number, column in enumerate((*columns, "peak, MiB by rank", "moved, MiB", "ahead by its fraction")):
        table.add_column(column, justify="left" if 0 < number < 3 else "right", no_wrap=True)
    for result in results:
        ahead = "smp_tf" if result["ahead"]["median"] >= 1.0 else "torch"
        for framework in FRAMEWORKS:
            of = result[framework]
            table.add_row(
                str(result["processes"]) if framework == "smp_tf" else "",
                PAIRS[result["schedule"]].name if framework == "smp_tf" else "",
                framework,
                f"{1e3 * of['serial_seconds']['median']:,.1f}",
                with_quartiles(of["step_seconds"], 1, 1e3),
                f"{of['speed_up']['median']:.2f}",
                with_quartiles(of["of_bound"]),
                f"{of['of_tasks_bound']['median']:.2f}",
                _mib(of["beyond_start"]),
                f"{sum(of['sent_bytes']) / MIB:,.2f}",
                _ahead(result["ahead"]) if framework == ahead else "",
            )
        table.add_section()
    return table

"""Medians, ratios and tables of what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WAYS = {
    "a": "one process, whole batch",
    "b": "one process, accumulating",
    "c": "pipeline",
}
MIB = 2**20


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Returns median, quartiles and all values of a series of measurements."""
    first, median, third = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0], values[0], values[0])
    )
    return {"median": median, "quartiles": [first, third], "all": list(values)}


def paired(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Returns the spread of the ratios of measurements that were made right after each other."""
    return spread([x / y for x, y in zip(over, under, strict=True)])


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of one size of model.

    Args:
        measured: `tokens` of a batch; `turns`: per way the seconds per step of each repetition; `bounds`: per
            repetition the lower bounds on a step in seconds by name.
    """
    turns, tokens = measured["turns"], measured["tokens"]
    bounds = measured["bounds"]
    return {
        "step_seconds": {way: spread(turns[way]) for way in turns},
        "tokens_per_second": {way: tokens / spread(turns[way])["median"] for way in turns},
        "speed_against_b": {way: paired(turns["b"], turns[way]) for way in turns},
        "step_over_bound": {name: paired(turns["c"], [each[name] for each in bounds]) for name in bounds[0]},
    }


def exponent(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Returns how something grows between two points.

    Args:
        first: size and seconds.
        last: size and seconds.

    Returns:
        The power of the size. 1 is linear. NaN where something took no time.
    """
    if min(first[1], last[1]) <= 0.0:
        return math.nan
    return math.log(last[1] / first[1]) / math.log(last[0] / first[0])


def with_quartiles(value: Mapping[str, Any], digits: int = 2, factor: float = 1.0) -> str:
    """Returns a median and its quartiles for a table.

    Args:
        value: result of `spread` or `paired`.
        digits: number of digits after the point.
        factor: multiplies all three, such as 1000 for milliseconds.
    """
    low, high = value["quartiles"]
    return f"{factor * value['median']:,.{digits}f} ({factor * low:,.{digits}f} – {factor * high:,.{digits}f})"


def _mib(count: float) -> str:
    return f"{count / MIB:,.0f}"


def _settings_line(result: Mapping[str, Any]) -> str:
    settings, machine = result["settings"], result["machine"]
    threads = ", ".join(f"({way}) {count}" for way, count in settings["intra_op_threads"].items())
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{settings['partitions']} partitions, {settings['microbatches']} microbatches, "
        f"{settings['schedule']}, balanced by {settings['optimize']}; {settings['optimizer']}, "
        f"{settings['dtype']}{', compiled by XLA' if settings['xla'] else ''}; "
        f"threads per operation of each process: {threads}; {settings['repetitions']} repetitions\n"
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {versions}"
    )


def print_tables(result: Mapping[str, Any], console: Console) -> None:
    """Prints what was measured.

    Args:
        result: result that `step_time.py` writes as JSON.
        console: prints the tables.
    """
    console.print(_settings_line(result), highlight=False)
    console.print(_speed_table(result["sizes"]))
    console.print(_bound_table(result["sizes"]))
    console.print(_memory_table(result["sizes"]))
    console.print(_start_table(result["sizes"]))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    return table


def _speed_table(sizes: Mapping[str, Any]) -> Table:
    table = _table(
        "Step time: median (quartiles); speed against (b) in the same repetition",
        *("size", "way", "step, ms", "tokens/s", "speed / (b)"),
    )
    for size, figures in sizes.items():
        for way, words in WAYS.items():
            table.add_row(
                size if way == "a" else "",
                f"({way}) {words}",
                with_quartiles(figures["step_seconds"][way], 1, 1e3),
                f"{figures['tokens_per_second'][way]:,.0f}",
                with_quartiles(figures["speed_against_b"][way]),
            )
        table.add_section()
    return table


def _bound_table(sizes: Mapping[str, Any]) -> Table:
    table = _table(
        "Pipeline step over the lower bound from the stages' own times",
        *("size", "stage", "F, ms", "B, ms", "step / bound", "with stages slowing each other"),
    )
    for size, figures in sizes.items():
        ratios = figures["step_over_bound"]
        for stage, alone in enumerate(figures["stage_seconds"]["alone"]):
            table.add_row(
                size if stage == 0 else "",
                str(stage),
                f"{1e3 * alone['forward']['median']:,.2f}",
                f"{1e3 * alone['backward']['median']:,.2f}",
                with_quartiles(ratios["alone"]) if stage == 0 else "",
                with_quartiles(ratios["together"]) if stage == 0 else "",
            )
        table.add_section()
    return table


def _memory_table(sizes: Mapping[str, Any]) -> Table:
    table = _table(
        "Peak memory in MiB: resident, beyond what the imports took, in tensors of 256 KiB and more (where oneDNN "
        "is on, else TensorFlow does not count them); and the plan's forecast",
        *("size", "process", "resident", "beyond imports", "tensors", "forecast"),
    )
    for size, figures in sizes.items():
        for way, ranks in figures["memory"].items():
            for rank, memory in enumerate(ranks):
                beyond = memory["resident_peak"] - memory["resident_before_model"]
                table.add_row(
                    size if way == "a" else "",
                    f"({way})" + (f" rank {rank}" if way == "c" else ""),
                    _mib(memory["resident_peak"]),
                    _mib(beyond),
                    _mib(memory["tensors_peak"]) if memory["tensors_peak"] else "",
                    _mib(memory["forecast"]["all"]) if "forecast" in memory else "",
                )
        table.add_section()
    return table


def _start_table(sizes: Mapping[str, Any]) -> Table:
    parts = ("start", "trace", "plan", "build", "graph", "first execution")
    table = _table("Time to the end of the first step, in seconds", "size", "process", *parts, "sum")
    for size, figures in sizes.items():
        for way, ranks in figures["first_step_seconds"].items():
            for rank, seconds in enumerate(ranks):
                table.add_row(
                    size if way == "a" else "",
                    f"({way})" + (f" rank {rank}" if way == "c" else ""),
                    *(f"{seconds[part]:.1f}" if part in seconds else "" for part in parts),
                    f"{sum(seconds.values()):.1f}",
                )
        table.add_section()
    return table

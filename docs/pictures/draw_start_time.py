"""Draws how the first step grows, from what `benchmarks/start_time.py` wrote as JSON, axis by axis.

python docs/pictures/draw_start_time.py partitions.json docs/pictures/start_time.svg
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drawing import draw_runs, new_row, save


def draw(runs: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draws all runs next to each other: medians of the first step, of plain Keras's, and of a step that follows.

    Args:
        runs: what the benchmark wrote.
        picture: the file.
    """
    starts = {axis: points for run in runs for axis, points in run["starts"].items()}
    figure, row = new_row(2.4 * len(starts) + 2.4, 2.6, len(starts))
    for axes, (axis, points) in zip(row, starts.items(), strict=True):
        sizes = [int(size) for size in points]
        for name, of, colour in (
            ("first step", lambda start: sum(start["parts"].values()), "#1f6feb"),
            ("first step of plain Keras, one process", lambda start: start["plain"], "#57606a"),
            ("a step that follows", lambda start: start["step"], "#d1661f"),
        ):
            medians = [statistics.median(map(of, found)) for found in points.values()]
            axes.plot(sizes, medians, marker="o", markersize=3, linewidth=1, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel(axis)
    row[0].set_ylabel("seconds")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right center")
    save(figure, picture)


if __name__ == "__main__":
    draw_runs(draw, [Path(name) for name in sys.argv[1:]])

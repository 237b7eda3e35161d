"""Draws how the first step grows, from what `benchmarks/start_time.py` wrote as JSON.

python docs/pictures/draw_start_time.py layers.json microbatches.json partitions.json docs/pictures/start_time.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from drawing import save


def draw(runs: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draws all runs beside each other: medians of the first step, of plain Keras's, and of a step that follows.

    Args:
        runs: what the benchmark wrote.
        picture: the file.
    """
    starts = {axis: points for run in runs for axis, points in run["starts"].items()}
    figure, columns = plt.subplots(
        1, len(starts), figsize=(2.9 * len(starts), 3.0), layout="constrained", squeeze=False
    )
    for axes, (axis, points) in zip(columns[0], starts.items(), strict=True):
        sizes = [int(size) for size in points]
        for name, of, colour in (
            ("first step", lambda start: sum(start["parts"].values()), "#1f6feb"),
            ("plain Keras, one process", lambda start: start["plain"], "#57606a"),
            ("a step that follows", lambda start: start["step"], "#d1661f"),
        ):
            medians = [statistics.median(map(of, found)) for found in points.values()]
            axes.plot(sizes, medians, marker="o", markersize=3, linewidth=1, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel(axis)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    columns[0][0].set_ylabel("seconds")
    handles, labels = columns[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=3)
    save(figure, picture)


def main(*files: Path) -> None:
    """Reads the runs and draws them into the last file."""
    draw([json.loads(file.read_text(encoding="utf-8")) for file in files[:-1]], files[-1])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

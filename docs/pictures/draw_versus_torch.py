"""Draws how near pipelines come to their own bounds, from what `benchmarks/versus_torch.py` wrote as JSON.

python docs/pictures/draw_versus_torch.py two_processes.json four_processes.json versus_torch.svg
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drawing import draw_runs, new_picture, save

COLOURS = {"smp_tf": "#1f6feb", "torch": "#d1661f"}


def draw(runs: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draws the medians of all runs into one picture, with quartiles.

    Args:
        runs: what the benchmark wrote.
        picture: the file.
    """
    results = [result for run in runs for result in run["results"]]
    sizes = list(dict.fromkeys(result["size"] for result in results))
    figure, axes = new_picture(6.4, 0.8 + 0.42 * len(results))
    for framework, shift in (("smp_tf", -0.15), ("torch", 0.15)):
        ratios = [result[framework]["of_bound"] for result in results]
        medians = [ratio["median"] for ratio in ratios]
        spread = [
            [median - ratio["quartiles"][0] for median, ratio in zip(medians, ratios, strict=True)],
            [ratio["quartiles"][1] - median for median, ratio in zip(medians, ratios, strict=True)],
        ]
        rows = [row + shift for row in range(len(results))]
        axes.barh(rows, medians, height=0.28, xerr=spread, color=COLOURS[framework], label=framework)
    axes.set_yticks(
        range(len(results)),
        [
            f"{result['name']}, {result['processes']} processes"
            + (f"\n{result['size'].removesuffix('+tied=0')}" if len(sizes) > 1 else "")
            for result in results
        ],
    )
    axes.invert_yaxis()
    axes.axvline(1.0, color="#555555", linewidth=0.8, linestyle=":")
    axes.set_xlabel("fraction of own bound: 1 wastes nothing")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    save(figure, picture)


if __name__ == "__main__":
    draw_runs(draw, [Path(name) for name in sys.argv[1:]])

"""Draws where the time of a pipeline's ranks goes, from what `benchmarks/bound.py` wrote as JSON.

python docs/pictures/draw_bound.py gpt.json conv.json docs/pictures/bound.svg
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drawing import draw_runs, new_picture, save

#: What is drawn, in words, with its colour; the first is work.
PARTS = {
    "compute": ("tasks", "#1f6feb"),
    "bubble": ("bubble", "#c9d1d9"),
    "message": ("waiting for a message", "#d1661f"),
    "apply": ("optimizer", "#2da44e"),
    "input": ("waiting for the next step", "#8250df"),
    "other": ("other", "#57606a"),
}


def draw(runs: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draws the medians of all runs into one picture, a bar for each number of microbatches and schedule.

    Args:
        runs: what the benchmark wrote.
        picture: the file.
    """
    bars: list[tuple[str, dict[str, float]]] = []
    for run in runs:
        words = {"p": run["settings"]["schedule"], "z": run["settings"]["zero_bubble"]}
        for size, numbers in run["sizes"].items():
            for count, told in numbers.items():
                for way, saw in told["seen"].items():
                    if way not in words:
                        continue
                    shares = {part: saw["parts"][part]["median"] for part in PARTS}
                    bars.append((f"{size}, m = {count}, {words[way]}", shares))
    figure, axes = new_picture(7.2, 0.9 + 0.26 * len(bars))
    left = [0.0] * len(bars)
    for part, (label, colour) in PARTS.items():
        widths = [100 * shares[part] for _, shares in bars]
        axes.barh(range(len(bars)), widths, left=left, height=0.7, color=colour, label=label)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("percent of the ranks' time")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    save(figure, picture)


if __name__ == "__main__":
    draw_runs(draw, [Path(name) for name in sys.argv[1:]])

"""What the pictures have in common: their looks, and that the same data give the same file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "smp_tf", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"})

import matplotlib.pyplot as plt  # noqa: E402 - the settings come first


def new_picture(width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure of a size in inches, with one pair of axes without a frame around it."""
    figure, [axes] = new_row(width, height, 1)
    return figure, axes


def new_row(width: float, height: float, columns: int) -> tuple[Any, Sequence[Any]]:
    """Returns a figure of a size in inches, with several pairs of axes without frames next to each other."""
    figure, made = plt.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for axes in made[0]:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, list(made[0])


def draw_runs(draw: Callable[[Sequence[Mapping[str, Any]], Path], None], files: Sequence[Path]) -> None:
    """Draws what benchmarks wrote as JSON into the last of the files."""
    draw([json.loads(file.read_text(encoding="utf-8")) for file in files[:-1]], files[-1])


def save(figure: Any, picture: Path) -> None:
    """Writes a figure as SVG, on white, so that it can be read on a dark page too; without the date."""
    figure.savefig(picture, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    text = "\n".join(line.rstrip() for line in picture.read_text(encoding="utf-8").splitlines())
    picture.write_text(text + "\n", encoding="utf-8")

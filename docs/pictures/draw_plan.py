"""Draws the plan of a model from a plan file: the layers of each stage, and the schedule: `make pictures`.

python docs/pictures/draw_plan.py plan.json docs/pictures/plan.svg
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from drawing import new_picture, save

import smp_tf  # noqa: F401 - above TensorFlow, and so that its rooms are found
from smp_tf.partition.plan.plan import as_bytes
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.schedules.schedule import build

COLOURS = ("#9ecbff", "#ffd8a8", "#b2f2bb", "#e5b3fe", "#ffc9c9", "#99e9f2")
#: Backward computes gradients by inputs and by weights: about twice what forward does.
BACKWARD = 2.0
HEIGHT = 0.8


def bytes_of(layer: str, variables: dict[str, str]) -> int:
    """Returns the bytes of the weights of a layer, such as those of "net/dense", from texts such as "float32[64,512]".

    Names of weights may leave out the model that the layer is in: "dense/kernel".
    """
    total = 0
    for name, kind in variables.items():
        if f"/{layer}/".endswith(f"/{name.rpartition('/')[0]}/"):
            described = re.fullmatch(r"[a-z]+(\d+)\[([\d,]*)\]", kind)
            if described is None:
                raise ValueError(f'The plan describes the weight {name} as {kind!r}, not as "float32[64,512]".')
            bits, shape = described.groups()
            total += int(bits) // 8 * math.prod(int(size) for size in shape.split(",") if size)
    return total


def draw_stages(axes: Any, plan: dict[str, Any]) -> None:
    """Draws a row per stage, and in it a block per layer, the narrower the more layers are next to it."""
    for stage, row in enumerate(plan["forecast"]):
        layers = [name for name, where in plan["units"].items() if where == stage]
        for number, layer in enumerate(layers):
            axes.barh(stage, 0.98 / len(layers), HEIGHT, number / len(layers), color=COLOURS[stage % len(COLOURS)])
            weights = bytes_of(layer, plan["variables"])
            words = [layer.rpartition("/")[2], as_bytes(weights) if weights else ""]
            axes.text((number + 0.49) / len(layers), stage, "\n".join(words).strip(), ha="center", va="center", size=7)
        told = f"{as_bytes(row['bytes'])}\n{row['time_share']:.0%} of the time"
        axes.text(1.01, stage, told, va="center", size=8)
    axes.set_yticks(range(plan["partitions"]), [f"stage {stage}" for stage in range(plan["partitions"])])
    axes.set_xticks([])
    axes.set_xlim(0, 1.2)
    axes.invert_yaxis()
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.set_title(
        f"layers with the bytes of their weights, balanced by {plan['optimize']}; memory and time of a stage",
        loc="left",
        size=9,
    )


def draw_schedule(axes: Any, plan: dict[str, Any]) -> None:
    """Draws a row per stage, time from left to right, forward and backward of every microbatch."""
    times = [
        ChunkTimes(row["time_share"] / (1 + BACKWARD), row["time_share"] * BACKWARD / (1 + BACKWARD), 0.0)
        for row in plan["forecast"]
    ]
    program = build(plan["pipeline"], stages=plan["partitions"], microbatches=plan["microbatches"])
    timeline = simulate(program, times)
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            length = span.end - span.start
            if span.task.kind.is_compute and length:
                dark = 1.0 if span.task.kind.word == "B" else 0.55
                axes.barh(rank, length, HEIGHT, span.start, color=COLOURS[rank % len(COLOURS)], alpha=dark, ec="white")
                # There is room for a name where a task is not all too short.
                name = f"{span.task.kind.word}{span.task.microbatch}" if length > 0.025 * timeline.step_time else ""
                axes.text(span.start + length / 2, rank, name, ha="center", va="center", size=7)
    axes.set_yticks(range(plan["partitions"]), [f"rank {rank}" for rank in range(plan["partitions"])])
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.set_xlabel("time ⟶")
    axes.set_title(
        f"{plan['pipeline']}, {plan['microbatches']} microbatches, by these shares of time", loc="left", size=9
    )


def main(file: Path, picture: Path) -> None:
    """Draws the first plan of a file."""
    written = json.loads(file.read_text(encoding="utf-8"))
    plan = {**written["plans"][0], "partitions": written["partitions"]}
    figure, axes = new_picture(8.0, 1.6 * plan["partitions"])
    axes.remove()
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
    for side in ("top", "right"):
        upper.spines[side].set_visible(False)
        lower.spines[side].set_visible(False)
    draw_stages(upper, plan)
    draw_schedule(lower, plan)
    save(figure, picture)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))

"""Compares what each rank was forecast to need with what TensorFlow's allocator counts, and with one process.

    python benchmarks/memory.py
    python benchmarks/memory.py --models gpt,digits --pipelines interleaved --partitions 4 --json memory.json

The models are those of the forecast's tests, both of the first examples, with larger batches, and one of each family of
tf_keras.applications at two sizes. Each is trained for seven steps, and the fullest of the last five counts. The
allocator of a CPU counts tensors of 256 KiB and more, which are the "counted" part of a forecast. The figures are not
the memory of the processes: each takes 500 MiB besides. One process accumulates the same microbatches.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from harness.fleet import Crew, TrainerError
from harness.machine import circumstances
from harness.options import new_file, some_of
from harness.report import MIB
from rich.console import Console
from rich.table import Table

#: One of each family of `tf_keras.applications`, and other models whose memory is not mostly weights and activations.
FAMILIES = (
    *("recommender", "unet3d", "bilstm", "convnext", "densenet", "efficientnet", "efficientnet_v2"),
    *("inception_resnet_v2", "inception_v3", "mobilenet", "mobilenet_v2", "mobilenet_v3", "nasnet", "regnet_x"),
    *("regnet", "resnet", "resnet_rs", "resnet_v2", "vgg", "xception"),
)
MODELS = (
    *("gpt", "conv", "mlp", "deep", "lstm", "resnet50", "digits", "language_model"),
    *FAMILIES,
    *(f"{name}_large" for name in FAMILIES),
)
PIPELINES = ("simple", "interleaved", "zb_h1")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=some_of(MODELS, "models"), default=list(MODELS), help=f"from {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--pipelines",
        type=some_of(PIPELINES, "pipelines"),
        default=["simple", "interleaved"],
        help=f"schedules, from {', '.join(PIPELINES)} (default: simple,interleaved)",
    )
    parser.add_argument("--partitions", type=int, default=2, help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for one answer")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    given = parser.parse_args(words)
    if given.partitions < 2:
        parser.error(f"--partitions is 2 or more; one process is measured beside it. Received: {given.partitions}")
    return given


def measure(given: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns the figures of every model in one process, and in every schedule over several."""
    rows = []
    config = {"microbatches": given.microbatches, "seed": 1}
    with (
        Crew("whole", [], 1, given.patience, script="processes/memory_rank.py") as whole,
        Crew("cut", [], given.partitions, given.patience, script="processes/memory_rank.py") as cut,
    ):
        for model in given.models:
            say(f"{model}: one process")
            [alone] = whole.ask("train", model=model, config={**config, "partitions": 1})
            for pipeline in given.pipelines:
                say(f"{model}: {given.partitions} partitions, {pipeline}")
                asked = {**config, "partitions": given.partitions, "pipeline": pipeline}
                ranks = cut.ask("train", model=model, config=asked)
                rows.append({"model": model, "pipeline": pipeline, "whole": alone["peak"], "ranks": ranks})
    return rows


def table_of(rows: Sequence[dict[str, Any]], about: str) -> Table:
    """Returns the forecast and the peak of every rank, and the peak as a share of one process's."""
    shown = Table(title=about, title_justify="left")
    forecast = ("forecast MiB", "counted MiB", "peak MiB", "counted / peak")
    for name in ("model", "schedule", "rank", *forecast, "peak / one process"):
        shown.add_column(name, justify="left" if name in ("model", "schedule") else "right", no_wrap=True)
    for row in rows:
        for rank, found in enumerate(row["ranks"]):
            stored, counted = found["forecast"]["stored_bytes"], found["counted"]
            shown.add_row(
                "" if rank else row["model"],
                "" if rank else row["pipeline"],
                str(rank),
                f"{stored / MIB:,.1f}",
                f"{counted / MIB:,.1f}",
                f"{found['peak'] / MIB:,.1f}",
                f"{counted / found['peak']:.2f}",
                f"{found['peak'] / row['whole']:.2f}",
                end_section=rank == len(row["ranks"]) - 1,
            )
    return shown


def main() -> None:
    given = arguments()
    # Of the ranks: without oneDNN the allocator of a CPU counts nothing.
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
    before = circumstances(given)
    try:
        rows = measure(given, Console(stderr=True).print)
    except TrainerError as error:
        raise SystemExit(f"memory: {error}") from None
    found = {
        **before,
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    about = f"{given.partitions} partitions, {given.microbatches} microbatches; one process accumulates as many"
    Console(width=max(110, Console().width)).print(table_of(rows, about))


if __name__ == "__main__":
    main()

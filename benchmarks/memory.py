"""Compares what each rank was forecast to need with what TensorFlow's allocator counts, and with one process.

    python benchmarks/memory.py
    python benchmarks/memory.py --models gpt,digits --pipelines interleaved --partitions 4 --json memory.json
    python benchmarks/memory.py --models regnet --ranks-only --all-tensors --json regnet.json
    python benchmarks/memory.py --show memory.json regnet.json

The models are those of the forecast's tests, both of the first examples, with larger batches, and one of each family of
tf_keras.applications at two sizes. Each is trained for seven steps, and the fullest of the last five counts. Each gets
processes of its own, since what an allocator has free depends on what ran before.

The allocator of a CPU counts tensors of 256 KiB and more, which are the "counted" part of a forecast. With
--all-tensors, and without oneDNN, TensorFlow's other allocator is taken, which counts all. The figures are not the
memory of the processes: each takes 500 MiB besides. One process accumulates the same microbatches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.fleet import Crew, TrainerError
from harness.machine import circumstances
from harness.options import new_file, some_of
from harness.report import MIB
from rich.console import Console
from rich.table import Table

#: One of each family of `tf_keras.applications`, and other kinds of models.
FAMILIES = (
    *("recommender", "unet3d", "bilstm", "grus", "transposed", "transposed3d", "separable", "float64"),
    *("convnext", "densenet", "efficientnet", "efficientnet_v2"),
    *("inception_resnet_v2", "inception_v3", "mobilenet", "mobilenet_v2", "mobilenet_v3", "nasnet", "regnet_x"),
    *("regnet", "resnet", "resnet_rs", "resnet_v2", "vgg", "xception"),
)
MODELS = (
    *("gpt", "conv", "mlp", "deep", "lstm", "resnet50", "digits", "language_model"),
    *FAMILIES,
    *(f"{name}_large" for name in FAMILIES),
)
PIPELINES = ("simple", "interleaved", "zb_h1")
#: Columns of the Markdown table for each rank.
PER_RANK = ("forecast, counted, peak, MiB", "counted / peak")


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
    parser.add_argument("--ranks-only", action="store_true", help="measure no single process besides the ranks")
    parser.add_argument("--all-tensors", action="store_true", help="take an allocator that counts small tensors, too")
    parser.add_argument("--without-onednn", action="store_true", help="train without oneDNN; all tensors are counted")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    parser.add_argument(
        "--show", type=Path, nargs="+", metavar="JSON", help="measure nothing; print what such files hold as Markdown"
    )
    given = parser.parse_args(words)
    if given.partitions < 2:
        parser.error(f"--partitions is 2 or more; one process is measured beside it. Received: {given.partitions}")
    return given


def measure(given: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns the figures of every model in one process, and in every schedule over several."""
    rows = []
    config = {"microbatches": given.microbatches, "seed": 1}

    def trained(way: str, partitions: int, model: str, **more: str) -> list[dict[str, Any]]:
        say(f"{model}: {', '.join([f'{partitions} partitions', *more.values()]) if partitions > 1 else 'one process'}")
        with Crew(
            way, [], partitions, given.patience, script="processes/memory_rank.py", variables=variables(given)
        ) as crew:
            return crew.ask("train", model=model, config={**config, "partitions": partitions, **more})

    for model in given.models:
        whole = None if given.ranks_only else trained("whole", 1, model)[0]["peak"]
        for pipeline in given.pipelines:
            ranks = trained("cut", given.partitions, model, pipeline=pipeline)
            rows.append({"model": model, "pipeline": pipeline, "whole": whole, "ranks": ranks})
    return rows


def variables(given: argparse.Namespace) -> dict[str, str]:
    """Returns environment variables of the ranks, by which their allocator counts."""
    # Without oneDNN, the allocator that a CPU has otherwise counts nothing.
    count_all = given.all_tensors or given.without_onednn
    return {
        "TF_ENABLE_ONEDNN_OPTS": "0" if given.without_onednn else "1",
        **({"TF_CPU_ALLOCATOR_USE_BFC": "1"} if count_all else {}),
    }


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
                f"{found['peak'] / row['whole']:.2f}" if row["whole"] else "-",
                end_section=rank == len(row["ranks"]) - 1,
            )
    return shown


def markdown(files: Sequence[Path]) -> list[str]:
    """Returns a Markdown table of what files of earlier measurements hold, with the commit of each row."""
    heads = ("model", "counts", "commit", *(f"rank {rank}: {of}" for rank in (0, 1) for of in PER_RANK))
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for file in files:
        found = json.loads(file.read_text())
        settings, commit = found["settings"], found["machine"]["commit"]
        counts = "all, without oneDNN" if settings["without_onednn"] else "all" if settings["all_tensors"] else "large"
        for row in found["rows"]:
            name = row["model"] if row["pipeline"] == "interleaved" else f"{row['model']}, {row['pipeline']}"
            cells = [f"`{name}`", counts, commit]
            for rank in row["ranks"]:
                stored, counted, peak = rank["forecast"]["stored_bytes"], rank["counted"], rank["peak"]
                cells += [", ".join(f"{size / MIB:,.0f}" for size in (stored, counted, peak)), f"{counted / peak:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    given = arguments()
    if given.show:
        print("\n".join(markdown(given.show)))
        return
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

"""Says what the memory of a pipeline's ranks, beyond their start, is made of.

    python benchmarks/rank_memory.py
    python benchmarks/rank_memory.py --schedule gpipe --processes 4 --json parts.json

The GPT and the settings are those of `versus_torch.py`. So is the memory that is shared out: resident memory at most
during steps, beyond what a rank had before its model was there. No time is measured, so others may use the machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.fleet import Crew, TrainerError
from harness.machine import circumstances
from harness.options import new_file
from harness.report import MIB
from rich.console import Console
from rich.table import Table
from versus.settings import PAIRS

#: The parts, with the words for each.
PARTS = {
    "weights": "weights",
    "slots": "the optimizer's slots",
    "large": "other tensors of 256 KiB and more, at most: sums of gradients, stash, temporaries",
    "c_heap": "in use in the C library's heap between steps: functions and kernels of TensorFlow, large Python objects",
    "python": "Python's small objects",
    "files": "pages of code and other files",
    "shared": "memory shared with other ranks, for messages",
    "rest": "small tensors of a running step, and memory that allocators hold and do not use",
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium+depth=8+batch=8", help="of the GPT, as gpt.size_of takes it")
    parser.add_argument("--processes", type=int, default=2, help="ranks of the pipeline (default: 2)")
    parser.add_argument("--schedule", choices=list(PAIRS), default="1f1b", help="schedule (default: 1f1b)")
    parser.add_argument("--microbatches", type=int, default=8, help="parts a batch is cut into (default: 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps that are looked at, after three others")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one answer")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    given = parser.parse_args(words)
    if given.processes < 2 or given.steps < 1:
        parser.error(f"--processes is 2 or more, and --steps 1 or more. Received: {given.processes}, {given.steps}")
    return given


def shared_out(rank: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of each part of a rank's memory. Together they are the peak.

    Args:
        rank: what the rank says.
    """
    found = {name: rank[name] for name in PARTS if name in rank}
    found["large"] = rank["tensors_peak"] - rank["weights"] - rank["slots"]
    found["rest"] = rank["peak"] - sum(found.values())
    return {name: found[name] for name in PARTS}


def table_of(ranks: Sequence[Mapping[str, int]], title: str) -> Table:
    """Returns the parts of every rank's memory in MiB.

    Args:
        ranks: what the ranks say.
        title: title of the table.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("MiB beyond the start")
    for number in range(len(ranks)):
        table.add_column(f"rank {number}", justify="right")
    parts = [shared_out(rank) for rank in ranks]
    for name, words in PARTS.items():
        table.add_row(words, *(f"{part[name] / MIB:,.0f}" for part in parts))
    table.add_section()
    table.add_row("at most in a step", *(f"{rank['peak'] / MIB:,.0f}" for rank in ranks))
    table.add_row("between steps", *(f"{rank['resident'] / MIB:,.0f}" for rank in ranks))
    own = [rank["resident"] - rank["files"] - rank["shared"] for rank in ranks]
    table.add_row("between steps, without files and shared memory", *(f"{count / MIB:,.0f}" for count in own))
    table.add_row("graphs that Python holds (ops)", *(f"{rank['graphs']} ({rank['ops']:,})" for rank in ranks))
    return table


def main() -> None:
    """Measures, and prints the table."""
    given = arguments()
    result: dict[str, Any] = circumstances(given)
    told = [f"{given.size}+tied=0", str(given.microbatches), "1", "estimate"]
    script = "processes/keras_trainer.py"
    try:
        with Crew(given.schedule, told, given.processes, given.patience, script=script) as crew:
            crew.ask("prepare")
            crew.ask("parts", count=3)
            result["ranks"] = crew.ask("parts", count=given.steps)
    except TrainerError as error:
        raise SystemExit(f"rank_memory: {error}") from None
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    title = f"GPT {given.size}, {PAIRS[given.schedule].name}, {given.microbatches} microbatches"
    Console(width=max(120, Console().width)).print(table_of(result["ranks"], title))


if __name__ == "__main__":
    main()

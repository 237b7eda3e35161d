"""The table of all settings that were compared with plain Keras, as a page to keep.

| model | P = 1 | P = 2 | ...
| mlp   | 8 of 8, losses 2e-16, weights 3e-12 | ...

All settings take more than an hour, so they may be run in parts (`make test-all ARGS="-k P3"`): a run replaces the
cells of what it ran, and keeps the others of a page that was made with the same versions of everything. Notes below
the table say from which sources each cell was made.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NOT_RUN = "not run"
PACKAGES = ("tensorflow-cpu", "tf-keras", "horovod", "numpy")
ROOT = Path(__file__).resolve().parents[2]
#: What cells of pages were made from that were written without notes.
UNKNOWN = "a commit that was not noted"
NOTES = "The cells were made from:"

HEAD = """\
# Training split over processes, compared with one plain Keras process

Every model is trained for six steps on P partitions with M microbatches (M in {1, 2, 4, 8}) and both schedules
("simple", "interleaved"), the step called eagerly in most of the settings; and again in one process that never imports
smp_tf, from the same seeds, on the same microbatches. A cell says how many of the eight settings agree, and the largest
relative deviation among them: of a step's loss, and of the six steps' change of a variable (float32 models: of all
weights together; "equal" is a change that is off by no more than rounding, 2e-15 of the variable's norm and 1e-11 of
the learning rate, or 1e-14 for moving averages). Tolerances: float64 1e-9; float32 1e-5; mixed_bfloat16 as the model's
entry in [models.py](models.py) says. The last models differ from others above them in little, and run with one setting
per P. Made by `make test-all`, whole or in parts: a run replaces the cells of what it ran. Below the table is from
which sources each cell was made.
"""


@dataclass
class Row:
    """What one setting gave.

    Args:
        losses, weights: largest relative deviations; None where it did not run to the end.
        agrees: whether all was within the tolerances.
    """

    losses: float | None
    weights: float | None
    agrees: bool


@dataclass
class ResultTable:
    """Collects settings and what they gave.

    Args:
        file: where to write the page; nothing is written without.
        root: the folder of the sources, as they are from now on.
    """

    file: Path | None
    root: Path = ROOT
    rows: dict[tuple[str, int], list[Row]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.date = datetime.datetime.now(datetime.timezone.utc).date()
        self.sources = sources_of(self.root, self.file)

    def add(self, model: str, partitions: int, row: Row) -> None:
        """Take in a setting."""
        self.rows.setdefault((model, partitions), []).append(row)

    def page(self, models: Sequence[str], partitions: Sequence[int], before: str = "") -> str:
        """The page, in Markdown, with the cells of the page before where nothing was run now."""
        versions = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in _installed()}
        known = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
        lines = [HEAD, f"Python {platform.python_version()}, {known}.", ""]
        same_versions = lines[1] in before.splitlines()
        cells, notes = (cells_of(before), notes_of(before)) if same_versions else ({}, {})
        at_the_end = sources_of(self.root, self.file)
        made_now = f"{self.sources} on {self.date}"
        if at_the_end != self.sources:
            made_now += f", which had become {at_the_end} at the end"
        made_from: dict[tuple[str, str], str] = {}
        columns = [f"P = {p}" for p in partitions]
        lines.append("| model | " + " | ".join(columns) + " |")
        lines.append("|---" * (1 + len(partitions)) + "|")
        for model in models:
            for p, column in zip(partitions, columns, strict=True):
                if (model, p) in self.rows:
                    cells[model, column] = cell(self.rows[model, p])
                    made_from[model, column] = made_now
                elif cells.setdefault((model, column), NOT_RUN) != NOT_RUN:
                    made_from[model, column] = notes.get((model, column), UNKNOWN)
            lines.append(f"| {model} | " + " | ".join(cells[model, column] for column in columns) + " |")
        notes_below = ["", NOTES, "", *noted(made_from, columns)] if made_from else []
        return "\n".join([*lines, *notes_below]) + "\n"

    def write(self, models: Sequence[str], partitions: Sequence[int]) -> None:
        """Write the page where one is wanted."""
        if self.file is not None:
            before = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
            self.file.write_text(self.page(models, partitions, before), encoding="utf-8")


def cells_of(page: str) -> dict[tuple[str, str], str]:
    """The cells of a page, by the names of their rows and columns."""
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return {(name, column): text for name, *cells in rows[2:] for column, text in zip(rows[0][1:], cells, strict=True)}


def sources_of(root: Path, page: Path | None) -> str:
    """What the sources in a folder are now: their commit, and whether they differ from it in more than the page."""
    if _git(root, "rev-parse", "--show-toplevel") != str(root.resolve()):
        return "sources outside a git checkout"
    status = _git(root, "status", "--porcelain", "--untracked-files=no") or ""
    changed = {root.resolve() / line[3:] for line in status.splitlines()} - {page and page.resolve()}
    dirty = " with changes that were not committed" if changed else ""
    return f"commit {_git(root, 'rev-parse', '--short=10', 'HEAD')}{dirty}"


def _git(root: Path, *arguments: str) -> str | None:
    """What git says about a folder; None where there is no git, or where it knows nothing of it."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip("\n")


def noted(made_from: Mapping[tuple[str, str], str], columns: Sequence[str]) -> list[str]:
    """A line for all cells that were made from the same sources; a model without columns stands for all of them."""
    lines = []
    for sources in dict.fromkeys(made_from.values()):
        of_models: dict[str, list[str]] = {}
        for (model, column), made in made_from.items():
            if made == sources:
                of_models.setdefault(model, []).append(column)
        models = [
            model if found == list(columns) else f"{model} ({', '.join(found)})" for model, found in of_models.items()
        ]
        lines.append(f"- {sources}: {', '.join(models)}")
    return lines


def notes_of(page: str) -> dict[tuple[str, str], str]:
    """From which sources a page says that its cells were made, by the names of their rows and columns."""
    columns = list(dict.fromkeys(column for _, column in cells_of(page)))
    found = {}
    for line in page.partition(NOTES)[2].splitlines():
        sources, _, models = line.removeprefix("- ").partition(": ")
        for model, some in re.findall(r"(\w+)(?: \(([^)]*)\))?", models):
            for column in some.split(", ") if some else columns:
                found[model, column] = sources
    return found


def _installed() -> list[importlib.metadata.Distribution]:
    return list(importlib.metadata.distributions())


def cell(rows: Sequence[Row]) -> str:
    """One model on one number of partitions."""
    said = f"{sum(row.agrees for row in rows)} of {len(rows)}"
    for name in ("losses", "weights"):
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        if values:
            said += f", {name} {max(values):.0e}" if max(values) else f", {name} equal"
    return said

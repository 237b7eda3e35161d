"""The table of all settings that were compared with plain Keras, as a page to keep.

| model | P = 1 | P = 2 | ...
| mlp   | 8 of 8, losses 2e-16, weights 3e-12 | ...

All settings take more than an hour, so they may be run in parts (`make test-all ARGS="-k P3"`): a run replaces the
cells of what it ran, and keeps the others of a page that was made with the same versions of everything.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

NOT_RUN = "not run"
PACKAGES = ("tensorflow-cpu", "tf-keras", "horovod", "numpy")

HEAD = """\
# Training split over processes, compared with one plain Keras process

Every model is trained for six steps on P partitions with M microbatches (M in {1, 2, 4, 8}) and both schedules
("simple", "interleaved"), the step called eagerly in most of the settings; and again in one process that never imports
smp_tf, from the same seeds, on the same microbatches. A cell says how many of the eight settings agree, and the largest
relative deviation among them: of a step's loss, and of the six steps' change of a variable (float32 models: of all
weights together; "equal" is a change that is off by no more than rounding, 2e-15 of the variable's norm and 1e-11 of
the learning rate, or 1e-14 for moving averages). Tolerances: float64 1e-9; float32 1e-5; mixed_bfloat16 as the model's
entry in [models.py](models.py) says. The last models differ from others above them in little, and run with one setting
per P. Made by `make test-all`, whole or in parts: a run replaces the cells of what it ran.
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
    """

    file: Path | None
    rows: dict[tuple[str, int], list[Row]] = field(default_factory=dict)

    def add(self, model: str, partitions: int, row: Row) -> None:
        """Take in a setting."""
        self.rows.setdefault((model, partitions), []).append(row)

    def page(self, models: Sequence[str], partitions: Sequence[int], before: str = "") -> str:
        """The page, in Markdown, with the cells of the page before where nothing was run now."""
        versions = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in _installed()}
        known = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
        lines = [HEAD, f"Python {platform.python_version()}, {known}.", ""]
        kept = cells_of(before) if lines[1] in before.splitlines() else {}
        columns = [f"P = {p}" for p in partitions]
        lines.append("| model | " + " | ".join(columns) + " |")
        lines.append("|---" * (1 + len(partitions)) + "|")
        for model in models:
            cells = [
                cell(self.rows[model, p]) if (model, p) in self.rows else kept.get((model, column), NOT_RUN)
                for p, column in zip(partitions, columns, strict=True)
            ]
            lines.append(f"| {model} | " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    def write(self, models: Sequence[str], partitions: Sequence[int]) -> None:
        """Write the page where one is wanted."""
        if self.file is not None:
            before = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
            self.file.write_text(self.page(models, partitions, before), encoding="utf-8")


def cells_of(page: str) -> dict[tuple[str, str], str]:
    """The cells of a page, by the names of their rows and columns."""
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return {(name, column): text for name, *cells in rows[2:] for column, text in zip(rows[0][1:], cells, strict=True)}


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

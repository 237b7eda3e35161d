"""An offline plan as text: the table of the plan, and the forecast of a step."""

from __future__ import annotations

import io
from math import inf

from rich.console import Console
from rich.table import Table

from smp_tf.offline.plan import OfflinePlan
from smp_tf.offline.search import Candidate, Search
from smp_tf.partition.plan.plan import as_bytes, as_seconds
from smp_tf.partition.plan.report import render
from smp_tf.pipeline.planner.times_by_size import other_sizes


def text(made: OfflinePlan, width: int = 100, color: bool = False) -> str:
    """Returns the text that `smp-tf plan` prints.

    Args:
        made: the plan.
        width: columns of the terminal.
        color: whether to mark the heading with terminal codes.
    """
    return f"{render(made.plan, width, color)}\n{forecast(made)}"


def forecast(made: OfflinePlan) -> str:
    """Returns the forecast of a step."""
    timeline = made.timeline
    source = "from measured times" if made.is_measured else "estimated from the sizes of operations, not measured"
    if made.measured_sizes:
        source = f"by measured times of {other_sizes(made.measured_sizes)}"
    whole = f"step: {as_seconds(made.step_seconds)} for a batch of {made.batch_size}"
    if made.replicas > 1:
        whole += f" on each of {made.replicas} replicas"
    waiting = f", of which ranks wait {timeline.bubble_ratio:.0%}"
    if reducing := max(made.reduce_seconds):
        left = as_seconds(timeline.step_time - timeline.computed)
        waiting += f"; gradients are averaged for {as_seconds(reducing)}, {left} of it after the last task"
    return f"{whole}{waiting}; {source}"


def comparison(found: Search, width: int = 100, color: bool = False) -> str:
    """Returns what other settings cost: the best for every number of partitions, and those like the best of all.

    Args:
        found: what was tried.
        width: columns of the terminal.
        color: whether to mark the heading with terminal codes.
    """
    table = Table(title=f"{len(found.candidates)} settings tried", title_justify="left", expand=False)
    for name, justify in (
        *(("partitions", "right"), ("replicas", "right"), ("micro-\nbatches", "right"), ("schedule", "left")),
        *(("fullest\nrank", "right"), ("waiting", "right"), ("samples\na second", "right"), ("", "left")),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for candidate in _shown(found):
        partitions, microbatches, _ = candidate.size
        share = candidate.speed / found.best.speed - 1 if found.best.speed else 0.0
        verdict = candidate.refused or ("taken" if candidate is found.best else f"{share:+.0%}")
        table.add_row(
            str(partitions),
            str(candidate.replicas),
            str(microbatches),
            candidate.config.pipeline + (",\nrecompute" if candidate.config.recompute else ""),
            as_bytes(candidate.needed) if candidate.needed is not None else "-",
            f"{candidate.bubble:.0%}" if candidate.bubble is not None else "-",
            _rate(candidate.speed) if candidate.fits else "-",
            verdict,
        )
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _rate(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _shown(found: Search) -> list[Candidate]:
    """Returns the fastest for every number of partitions, and all with as many partitions as the one that is taken."""
    fastest: dict[int, Candidate] = {}
    for candidate in found.candidates:
        known = fastest.get(candidate.size[0])
        # Of those that do not fit, the smallest. The size is unknown where the model has too few layers.
        size, least = (inf if c is None or c.needed is None else c.needed for c in (candidate, known))
        smaller = known is not None and not known.fits and size < least
        if known is None or candidate.speed > known.speed or (not candidate.fits and smaller):
            fastest[candidate.size[0]] = candidate
    taken = found.best.size[0]
    return [c for c in found.candidates if c.size[0] == taken or c is fastest[c.size[0]]]

"""Draws a simulated step as text, a row per rank, time from left to right.

rank 0  F0 F1 .. .. B0=== .. B1===    a task is as wide as it is long
rank 1  .. F0 B0=== F1 B1=== .. ..    dots: the rank waits
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from smp_tf.pipeline.programs.kinds import KINDS, Busy, Phase
from smp_tf.pipeline.programs.replay import Span
from smp_tf.pipeline.programs.simulate import SimulatedStep
from smp_tf.pipeline.task import Program, Task


def draw(timeline: SimulatedStep, unit: float | None = None) -> str:
    """Returns a picture of what the ranks do in a step, without messages.

    What a rank does with other replicas meanwhile has its own row under the rank's. What the script writes, after the
    step, is in parentheses.

    Args:
        timeline: the simulated step.
        unit: time per column; None for that of the shortest task. A column is as wide as the longest task name. Tasks
            that start or end within a column are drawn to the nearest one.

    Returns:
        A line per rank.

    Example:
        >>> from smp_tf.pipeline.schedules.schedule import build
        >>> from smp_tf.pipeline.programs.chunk_times import ChunkTimes
        >>> from smp_tf.pipeline.programs.simulate import simulate
        >>> equal = ChunkTimes(forward=1, input_gradient=1, weight_gradient=0)
        >>> print(draw(simulate(build("interleaved", stages=2, microbatches=2), equal)))
        rank 0  F0 F1 .. B0 .. B1
        rank 1  .. F0 B0 F1 B1 ..
    """
    label = functools.partial(_label, timeline.program)
    rows = [_of(spans, Busy.RANK) for spans in timeline.spans]
    lines_of = [_of(spans, Busy.LINE) for spans in timeline.spans]
    spans = [span for row in (*rows, *lines_of) for span in row]
    if not spans:
        return "\n".join(f"rank {rank}" for rank in range(timeline.program.stages))
    column = min(span.end - span.start for span in spans) if unit is None else unit
    width = max(len(label(span.task)) for span in spans)
    columns = round(timeline.step_time / column)
    lines = []
    for rank, (row, line) in enumerate(zip(rows, lines_of, strict=True)):
        for head, own in ((f"rank {rank:<3}", row), (" " * 8, line)):
            if own or own is row:
                cells = ["." * width] * columns
                for span in own:
                    start, end = round(span.start / column), round(span.end / column)
                    if end > start:
                        length = (width + 1) * (end - start) - 1
                        cells[start:end] = [label(span.task).ljust(length, "=")]
                        cells[start + 1 : start + 1] = [""] * (end - start - 1)
                lines.append(head + " ".join(cell for cell in cells if cell))
    return "\n".join(lines)


def _of(spans: Sequence[Span], busy: Busy) -> list[Span]:
    return [span for span in spans if KINDS[span.task.kind].busy is busy and span.end > span.start]


def _label(program: Program, task: Task) -> str:
    name = str(task) if program.chunks > program.stages else str(task).lstrip("0123456789")
    return f"({name})" if program.by_script and KINDS[task.kind].phase is Phase.UPDATE else name

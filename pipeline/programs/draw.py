"""Draws a simulated step as text, a row per rank, time from left to right.

rank 0  F0 F1 .. .. B0=== .. B1===    a task is as wide as it is long
rank 1  .. F0 B0=== F1 B1=== .. ..    dots: the rank waits
"""

from __future__ import annotations

from smp_tf.pipeline.programs.simulate import Timeline
from smp_tf.pipeline.task import Kind, Task


def draw(timeline: Timeline, unit: float | None = None) -> str:
    """Returns a picture of the compute tasks of a step.

    Args:
        timeline: the simulated step.
        unit: time per column, a column being as wide as the longest task name; None for the
            shortest task. Tasks that start or end within a column are drawn to the nearest one.

    Returns:
        A line per rank.

    Example:
        >>> from smp_tf.pipeline.schedules.schedule import build
        >>> from smp_tf.pipeline.programs.simulate import ChunkTimes, simulate
        >>> equal = ChunkTimes(forward=1, input_gradient=1, weight_gradient=0)
        >>> print(draw(simulate(build("interleaved", stages=2, microbatches=2), equal)))
        rank 0  F0 F1 .. B0 .. B1
        rank 1  .. F0 B0 F1 B1 ..
    """
    name_chunks = timeline.program.chunks > timeline.program.stages
    rows = [[span for span in spans if span.task.kind.is_compute and span.end > span.start] for spans in timeline.spans]
    spans = [span for row in rows for span in row]
    if not spans:
        return "\n".join(f"rank {rank}" for rank in range(timeline.program.stages))
    column = min(span.end - span.start for span in spans) if unit is None else unit
    width = max(len(_label(span.task, name_chunks)) for span in spans)
    columns = round(timeline.step_time / column)
    lines = []
    for rank, row in enumerate(rows):
        cells = ["." * width] * columns
        for span in row:
            start, end = round(span.start / column), round(span.end / column)
            if end > start:
                length = (width + 1) * (end - start) - 1
                cells[start:end] = [_label(span.task, name_chunks).ljust(length, "=")]
                cells[start + 1 : start + 1] = [""] * (end - start - 1)
        lines.append(f"rank {rank:<3}{' '.join(cell for cell in cells if cell)}")
    return "\n".join(lines)


def _label(task: Task, name_chunks: bool) -> str:
    kind = f"T{task.sweep}." if task.kind is Kind.T else task.kind.value
    return f"{task.chunk if name_chunks else ''}{kind}{task.microbatch}"

"""An offline plan as text: the table of the plan, and what is forecast of a step."""

from __future__ import annotations

from smp_tf.offline_plan import OfflinePlan
from smp_tf.partition.report import render


def text(made: OfflinePlan, width: int = 100, color: bool = False) -> str:
    """What `smp-tf plan` prints.

    Args:
        made: the plan.
        width: columns of the terminal.
        color: mark the heading with terminal codes.
    """
    return f"{render(made.plan, width, color)}\n{forecast(made)}"


def forecast(made: OfflinePlan) -> str:
    """What is forecast of a step."""
    timeline = made.timeline
    return (
        f"step: {in_seconds(timeline.step_time)} for a batch of {made.batch_size}, of which ranks wait "
        f"{timeline.bubble_ratio:.0%}; estimated from the sizes of operations, not measured"
    )


def in_seconds(seconds: float) -> str:
    """Seconds for people, such as "12 ms"."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms"

"""What a plan needs of each rank, against what a rank may need."""

from __future__ import annotations

from collections.abc import Sequence

from smp_tf.partition.errors import MemoryLimitError
from smp_tf.partition.plan import Plan, StageForecast, as_bytes
from smp_tf.partition.report import layer_names


def excess(plan: Plan, limit: int) -> int:
    """Bytes by which the fullest stage of a plan exceeds the limit; 0 or less where all keep within it.

    Args:
        plan: the plan, with its forecast.
        limit: bytes a rank may need.
    """
    return max(row.stored_bytes for row in plan.forecast) - limit


def too_large(plan: Plan, limit: int) -> MemoryLimitError:
    """The error for a plan of which some stage exceeds the limit: what each needs, and what would help.

    Args:
        plan: the plan, with its forecast.
        limit: bytes a rank may need.
    """
    count = "1 partition" if plan.stages == 1 else f"{plan.stages} partitions"
    lines = [f"The model does not fit: memory_limit is {_exactly(limit)} a rank, and with {count} the ranks need"]
    names = layer_names(plan)
    over = [row for row in plan.forecast if row.stored_bytes > limit]
    for stage, row in enumerate(plan.forecast):
        verdict = f", {as_bytes(row.stored_bytes - limit)} too much" if row.stored_bytes > limit else ""
        lines.append(f"  stage {stage}: {as_bytes(row.stored_bytes)}{verdict} ({_parts(row)}) for {names[stage]}")
    return MemoryLimitError("\n".join([*lines, f"What would help: {'; '.join(_advice(plan, over))}."]))


def _exactly(count: int) -> str:
    """Bytes for people, and the number where that is not the same."""
    return as_bytes(count) if count < 1024 else f"{as_bytes(count)} ({count:,} bytes)"


def _parts(row: StageForecast) -> str:
    parts = {
        "weights": row.weight_bytes,
        "gradients": row.gradient_bytes,
        "slots": row.slot_bytes,
        "stash": row.stash_bytes,
        "work": row.working_bytes,
    }
    return ", ".join(f"{name} {as_bytes(count)}" for name, count in parts.items() if count) or "nothing"


def _advice(plan: Plan, over: Sequence[StageForecast]) -> list[str]:
    advice = []
    if any(row.units > 1 for row in over):
        advice.append("more partitions")
    if any(row.stash_bytes or row.working_bytes for row in over):
        advice.append("smaller microbatches: a larger `microbatches`, or smaller batches")
    if plan.schedule == "simple" and any(row.in_flight > plan.stages for row in over):
        advice.append('pipeline "interleaved", which keeps the stash of fewer microbatches')
    advice.append("a higher memory_limit")
    return advice

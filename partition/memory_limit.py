"""What a plan needs of each rank, against what a rank may need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smp_tf.partition.errors import MemoryLimitError
from smp_tf.partition.plan import Plan, StageForecast, as_bytes
from smp_tf.partition.report import layer_names


def excess(plan: Plan, limits: Sequence[float | None]) -> float:
    """Bytes by which the stage that exceeds its limit most does so; 0 or less where all keep within theirs.

    Args:
        plan: the plan, with its forecast.
        limits: bytes that each stage may need on its device, or None.
    """
    over = (row.device_bytes - limit for row, limit in zip(plan.forecast, limits, strict=True) if limit is not None)
    return max(over, default=0.0)


def too_large(plan: Plan, limits: Sequence[float | None], nearest: Iterable[str] = ()) -> MemoryLimitError:
    """The error for a plan of which some stage exceeds its limit: what each needs, and what would help.

    Args:
        plan: the plan, with its forecast.
        limits: bytes that each stage may need, or None.
        nearest: settings with which it is known to fit, in words.
    """
    count = "1 partition" if plan.stages == 1 else f"{plan.stages} partitions"
    alike = len(set(limits)) == 1
    if alike:
        limit = _exactly(int(limits[0] or 0))
        lines = [f"The model does not fit: memory_limit is {limit} a rank, and with {count} the ranks need"]
    else:
        lines = [f"The model does not fit: ranks may need as listed, and with {count} they need"]
    names = layer_names(plan)
    over = []
    for stage, (row, most) in enumerate(zip(plan.forecast, limits, strict=True)):
        verdict = f" of {as_bytes(most)}" if not alike and most is not None else ""
        if most is not None and row.device_bytes > most:
            over.append(row)
            verdict += f", {as_bytes(row.device_bytes - most)} too much"
        layers = names[stage]
        # Of a plan for speed it is known of another layer, that which takes the longest.
        if plan.objective == "memory" and row.units > 1 and row.largest_share > 0.5:
            layers = f"{names[stage]}; {row.largest} alone keeps {row.largest_share:.0%}"
        lines.append(f"  stage {stage}: {as_bytes(row.device_bytes)}{verdict} ({_parts(row)}) for {layers}")
    lines.append(f"What would help: {'; '.join(_advice(plan, over))}.")
    if found := list(nearest):
        lines.append(f"What would fit: {'; or '.join(found)}.")
    error = MemoryLimitError("\n".join(lines))
    error.needed = max(row.device_bytes for row in plan.forecast)
    return error


def _exactly(count: int) -> str:
    """Bytes for people, and the number where that is not the same."""
    return as_bytes(count) if count < 1024 else f"{as_bytes(count)} ({count:,} bytes)"


def _parts(row: StageForecast) -> str:
    parts = {
        "weights": row.weight_bytes,
        "gradients": row.gradient_bytes,
        "slots": row.slot_bytes,
        "stash": row.stash_bytes,
        "transport": row.transport_bytes,
        "work": row.working_bytes,
    }
    words = ", ".join(f"{name} {as_bytes(count)}" for name, count in parts.items() if count) or "nothing"
    return f"{words}; of these, {as_bytes(row.host_bytes)} on the host" if row.host_bytes else words


def _advice(plan: Plan, over: Sequence[StageForecast]) -> list[str]:
    advice = []
    if any(row.units > 1 for row in over):
        advice.append("more partitions")
    if any(row.stash_bytes or row.transport_bytes or row.working_bytes for row in over):
        advice.append("smaller microbatches: a larger `microbatches`, or smaller batches")
    if any(row.stash_bytes for row in over) and not plan.recompute:
        advice.append("recompute true")
    if plan.schedule == "simple" and any(row.in_flight > plan.stages for row in over):
        advice.append('pipeline "interleaved", which keeps the stash of fewer microbatches')
    advice.append("a higher memory_limit")
    return advice

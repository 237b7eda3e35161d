"""What a plan needs of each rank, against what a rank may need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smp_tf.partition.errors import MemoryLimitError
from smp_tf.partition.placement import Ranks
from smp_tf.partition.plan import Plan, StageForecast, as_bytes
from smp_tf.partition.report import layer_names

#: Of stages that need more, so many are named.
_MOST_STAGES = 4


def excess(plan: Plan, limits: Sequence[float | None]) -> float:
    """Bytes by which the stage that exceeds its limit most does so; 0 or less where all keep within theirs.

    Args:
        plan: the plan, with its forecast.
        limits: bytes that each stage may need on its device, or None.
    """
    over = (row.device_bytes - limit for row, limit in zip(plan.forecast, limits, strict=True) if limit is not None)
    return max(over, default=0.0)


def too_large(plan: Plan, ranks: Ranks, nearest: Iterable[str] = ()) -> MemoryLimitError:
    """The error for a plan of which some stage exceeds its limit: what each needs, and what would help.

    Args:
        plan: the plan, with its forecast.
        ranks: bytes that each stage may need, and what says so.
        nearest: settings with which it is known to fit, in words.
    """
    count = "1 partition" if plan.stages == 1 else f"{plan.stages} partitions"
    alike = are_alike(ranks)
    if alike:
        limit = _exactly(int(ranks.memory[0] or 0))
        lines = [
            f"The model does not fit: {ranks.limit_in_words(0)} is {limit} a rank, and with {count} the ranks need"
        ]
    else:
        lines = [f"The model does not fit: ranks may need as listed, and with {count} they need"]
    names = layer_names(plan)
    over = []
    for stage, (row, most) in enumerate(zip(plan.forecast, ranks.memory, strict=True)):
        verdict = f" of {as_bytes(most)} ({ranks.limit_in_words(stage)})" if not alike and most is not None else ""
        if most is not None and row.device_bytes > most:
            over.append(stage)
            verdict += f", {as_bytes(row.device_bytes - most)} too much"
        layers = names[stage]
        # Of a plan for speed it is known of another layer, that which takes the longest.
        if plan.objective == "memory" and row.units > 1 and row.largest_share > 0.5:
            layers = f"{names[stage]}; {row.largest} alone keeps {row.largest_share:.0%}"
        lines.append(f"  stage {stage}: {as_bytes(row.device_bytes)}{verdict} ({_parts(row)}) for {layers}")
    lines.append(f"What would help: {'; '.join(_advice(plan, ranks, over))}.")
    if found := list(nearest):
        lines.append(f"What would fit: {'; or '.join(found)}.")
    error = MemoryLimitError("\n".join(lines))
    error.needed = max(row.device_bytes for row in plan.forecast)
    error.excess = excess(plan, ranks.memory)
    return error


def are_alike(ranks: Ranks) -> bool:
    """Whether all may need as much, and the same says so.

    Args:
        ranks: the ranks.
    """
    return len(set(ranks.memory)) == 1 and len(set(ranks.limited_by)) <= 1


def enough(plan: Plan, ranks: Ranks) -> str:
    """The memory with which a plan would fit, in words.

    Args:
        plan: the plan, with its forecast.
        ranks: bytes that each stage may need, and what says so.
    """
    if are_alike(ranks):
        most = as_bytes(max(row.device_bytes for row in plan.forecast), up=True)
        return f"ranks with {most}" if any(ranks.limited_by) else f"a memory_limit of {most}"
    over = [
        (stage, row.device_bytes)
        for stage, (row, most) in enumerate(zip(plan.forecast, ranks.memory, strict=True))
        if most is not None and row.device_bytes > most
    ]
    told = [f"{as_bytes(nbytes, up=True)} for stage {stage}" for stage, nbytes in over[:_MOST_STAGES]]
    more = f", and what {len(over) - len(told)} more stages need" if len(over) > len(told) else ""
    return f"ranks with {', '.join(told)}{more}"


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


def _advice(plan: Plan, ranks: Ranks, over: Sequence[int]) -> list[str]:
    advice, rows = [], [plan.forecast[stage] for stage in over]
    if any(row.units > 1 for row in rows):
        advice.append("more partitions")
    if any(row.stash_bytes or row.transport_bytes or row.working_bytes for row in rows):
        advice.append("smaller microbatches: a larger `microbatches`, or smaller batches")
    if any(row.stash_bytes for row in rows) and not plan.recompute:
        advice.append("recompute true")
    if plan.schedule == "simple" and any(row.in_flight > plan.stages for row in rows):
        advice.append('pipeline "interleaved", which keeps the stash of fewer microbatches')
    by_hosts = [bool(ranks.limited_by and ranks.limited_by[stage]) for stage in over]
    advice += ["a higher memory_limit"] * (not all(by_hosts)) + ["ranks with more memory"] * any(by_hosts)
    return advice

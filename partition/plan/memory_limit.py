"""Compares the memory that a plan needs on each rank with what the rank may need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smp_tf.partition.errors import MemoryLimitError
from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.plan.plan import Plan, StageForecast, as_bytes
from smp_tf.partition.plan.report import layer_names

#: With more stages than this, only those that need too much are listed, and at most this many.
_MOST_LINES = 16
#: How many stages that need larger ranks are named.
_MOST_STAGES = 4


def excess(plan: Plan, limits: Sequence[float | None]) -> float:
    """Returns the most bytes by which a stage exceeds its limit; 0 or less where none does.

    Args:
        plan: the plan, with its forecast.
        limits: bytes that each stage may need on its device, or None.
    """
    over = (row.device_bytes - limit for row, limit in zip(plan.forecast, limits, strict=True) if limit is not None)
    return max(over, default=0.0)


def too_large(
    plan: Plan, ranks: Ranks, nearest: Iterable[str] = (), *, averaging: int = 0, is_given: bool = False
) -> MemoryLimitError:
    """Returns the error for a plan with a stage over its limit. It says what each stage needs, and what would help.

    Args:
        plan: the plan, with its forecast.
        ranks: bytes that each stage may need, and what says so.
        nearest: the words for settings with which it is known to fit.
        averaging: bytes of the buffer through which each rank averages gradients. They are a part of its transport
            bytes.
        is_given: whether a file says the placement.
    """
    count = "1 partition" if plan.stages == 1 else f"{plan.stages} partitions"
    alike = _are_alike(ranks)
    if alike:
        limit = _exactly(int(ranks.memory[0] or 0))
        lines = [
            f"The model does not fit: {ranks.limit_in_words(0)} is {limit} a rank, and with {count} the ranks need"
        ]
    else:
        lines = [f"The model does not fit: ranks may need as listed, and with {count} they need"]
    names = layer_names(plan)
    over = _over(plan, ranks)
    shown = range(plan.stages) if plan.stages <= _MOST_LINES else over[:_MOST_LINES]
    for stage in shown:
        row, most = plan.forecast[stage], ranks.memory[stage]
        verdict = f" of {as_bytes(most)} ({ranks.limit_in_words(stage)})" if not alike and most is not None else ""
        if most is not None and stage in over:
            verdict += f", {as_bytes(row.device_bytes - most)} too much"
        layers = names[stage]
        # A plan for speed names another layer, the one that takes the longest.
        if plan.objective == "memory" and row.units > 1 and row.largest_share > 0.5:
            layers = f"{names[stage]}; {row.largest} alone keeps {row.largest_share:.0%}"
        lines.append(f"  stage {stage}: {as_bytes(row.device_bytes)}{verdict} ({_parts(row)}) for {layers}")
    if len(over) > len(shown):
        most_over = as_bytes(excess(plan, ranks.memory))
        lines.append(f"  and {len(over) - len(shown)} stages more, of which one needs {most_over} too much")
    lines.append(f"What would help: {'; '.join(_advice(plan, ranks, over, averaging, is_given))}.")
    if found := list(nearest):
        lines.append(f"What would fit: {'; or '.join(found)}.")
    error = MemoryLimitError("\n".join(lines))
    error.needed = max(row.device_bytes for row in plan.forecast)
    error.excess = excess(plan, ranks.memory)
    return error


def _over(plan: Plan, ranks: Ranks) -> list[int]:
    """Returns the stages that need more than their limits."""
    pairs = enumerate(zip(plan.forecast, ranks.memory, strict=True))
    return [stage for stage, (row, most) in pairs if most is not None and row.device_bytes > most]


def _are_alike(ranks: Ranks) -> bool:
    """Returns whether all stages have the same limit, and it comes from the same place."""
    return len({(most, ranks.limit_in_words(stage)) for stage, most in enumerate(ranks.memory)}) == 1


def enough(plan: Plan, ranks: Ranks) -> str:
    """Returns the words for the memory with which a plan would fit: `memory_limit`, that of ranks, or both.

    Args:
        plan: the plan, with its forecast.
        ranks: bytes that each stage may need, and what says so.
    """
    needed = [row.device_bytes for row in plan.forecast]
    over, own = _over(plan, ranks), ranks.own or (None,) * plan.stages
    parts = []
    # For a rank that has less than the limit, it is only known that the limit is no smaller.
    limits = [most for stage, most in enumerate(ranks.memory) if most is not None and not ranks.is_own_limit(stage)]
    least = min(limits, default=None)
    if least is not None and max(needed) > least:
        parts.append(f"a memory_limit of {as_bytes(max(needed), up=True)}")
    larger = [stage for stage in over if (most := own[stage]) is not None and needed[stage] > most]
    if larger and len(set(own)) == 1:
        parts.append(f"ranks with {as_bytes(max(needed[stage] for stage in larger), up=True)}")
    elif larger:
        told = [f"{as_bytes(needed[stage], up=True)} for stage {stage}" for stage in larger[:_MOST_STAGES]]
        more = f", and what {len(larger) - len(told)} more stages need" if len(larger) > len(told) else ""
        parts.append(f"ranks with {', '.join(told)}{more}")
    return " and ".join(parts)


def _exactly(count: int) -> str:
    """Returns the bytes for people, and the exact number where it differs."""
    return as_bytes(count) if count < 1024 else f"{as_bytes(count)} ({count:,} bytes)"


def _parts(row: StageForecast) -> str:
    words = ", ".join(f"{name} {as_bytes(count)}" for name, count in row.memory.uses.items() if count) or "nothing"
    return f"{words}; of these, {as_bytes(row.host_bytes)} on the host" if row.host_bytes else words


def _advice(plan: Plan, ranks: Ranks, over: Sequence[int], averaging: int, is_given: bool) -> list[str]:
    advice, rows = [], [plan.forecast[stage] for stage in over]
    if any(row.units > 1 for row in rows) and not is_given:
        advice.append("more partitions")
    if any(row.stash_bytes + row.transport_bytes + row.working_bytes > averaging for row in rows):
        advice.append("smaller microbatches: a larger `microbatches`, or smaller batches")
    if averaging:
        advice.append(
            f"a smaller HOROVOD_FUSION_THRESHOLD, or one replica: {as_bytes(averaging)} are Horovod's, to average in"
        )
    if any(row.stash_bytes for row in rows) and not plan.recompute:
        advice.append("recompute true")
    if plan.schedule == "simple" and any(row.in_flight > plan.stages for row in rows) and not is_given:
        advice.append('pipeline "interleaved", which keeps the stash of fewer microbatches')
    by_ranks = [ranks.is_own_limit(stage) for stage in over]
    advice += ["a higher memory_limit"] * (not all(by_ranks)) + ["ranks with more memory"] * any(by_ranks)
    return advice

"""What ranks held in an earlier training by the same plan, which then is the forecast."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from smp_tf.partition.plan.stage_forecast import Source, StageForecast, Use

#: What gives way first where an earlier training held less than is forecast. The rest is known by its size.
_GIVES_WAY = (Use.WORK, Use.TRANSPORT, Use.STASH)


@dataclass(frozen=True)
class HeldMemory:
    """What the rank of a stage held at most.

    Args:
        bytes: the most bytes beyond those that were there before the first step.
        slots: bytes of the optimizer's slots among them.
        uncounted: bytes of tensors that are so small that they were not counted, as they were forecast.
        forecast: the bytes that were forecast of what was counted, before any training by the plan.
        is_resident: whether these are bytes of the process's resident memory, since the allocator does not count. Such
            bytes also have graphs and code, which no forecast has.
    """

    bytes: int
    slots: int
    uncounted: int
    forecast: int
    is_resident: bool = False


def as_held(row: StageForecast, held: HeldMemory, *, counted_only: bool = False) -> StageForecast:
    """Returns the forecast of a stage that holds as much as in an earlier training, if that was counted.

    Args:
        row: the forecast by the stage's ops.
        held: what its rank held.
        counted_only: whether tensors that were too small to be counted are left out.
    """
    if held.is_resident:
        return row
    row = row.with_memory({Use.SLOTS: held.slots})
    less = row.device_bytes - held.bytes - (0 if counted_only else held.uncounted)
    memory = dict(row.memory.uses)
    for use in _GIVES_WAY:
        # Below 0, it is more.
        taken = min(less, memory[use])
        memory[use] -= taken
        less -= taken
    return dataclasses.replace(row.with_memory(memory), source=Source.TRAINING)

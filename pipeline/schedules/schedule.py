"""Schedules: from (kind, stages, microbatches) to one ordered list of tasks per rank.

The order of tasks on a rank, for 3 stages and 4 microbatches (a column is one unit of time, B
takes one here, a dot is idle time; `draw` makes such pictures):

    simple (GPipe)                        interleaved (1F1B)
    rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Both take the same time; simple keeps the stash of every microbatch, interleaved on rank r at most that of stages - r.
Others cut the model into more chunks than ranks, or backward into two pieces, and so wait less or keep less.
docs/schedules.md draws and compares all of them. To add a schedule, write one pure function (as in `orders.py` and
`v_orders.py`) and enter it in `SCHEDULES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from smp_tf.pipeline.collection import collection_put_off
from smp_tf.pipeline.errors import ScheduleError, require_at_least
from smp_tf.pipeline.programs.stash import peak_stash as peak_stash
from smp_tf.pipeline.programs.transfers import add_transfers as add_transfers
from smp_tf.pipeline.schedules.any_placement import interleaved_over, simple_over
from smp_tf.pipeline.schedules.orders import Order, Ranks, interleaved, interleaved_1f1b, simple, zb_h1
from smp_tf.pipeline.schedules.placements import RanksOfChunks, in_a_v, looped
from smp_tf.pipeline.schedules.schedule_file import load_schedule
from smp_tf.pipeline.schedules.sweeps import forward_only, with_sweeps
from smp_tf.pipeline.schedules.v_orders import v_half, v_min, zb_v
from smp_tf.pipeline.task import Program

# `add_transfers` and `peak_stash` are named here, too, for those who import them from where they build programs.


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to order the tasks of a step.

    Attributes:
        name: what `build` calls it.
        order: returns the tasks of every rank in order, from (stages, microbatches, chunks per rank).
        placement: returns the rank of every chunk, from (stages, chunks per rank).
        chunks_per_rank: how many chunks it needs on a rank; the fewest where more are possible.
        more_chunks: whether a rank may have more.
        splits_backward: whether backward is in two pieces, I and W, rather than one, B.
    """

    name: str
    order: Order
    placement: RanksOfChunks = looped
    chunks_per_rank: int = 1
    more_chunks: bool = False
    splits_backward: bool = False

    def chunks_for(self, chunks_per_rank: Any) -> int:
        """Returns how many chunks a rank gets.

        Args:
            chunks_per_rank: what was asked for; None for the fewest that the schedule takes.

        Returns:
            The number of chunks of each rank.

        Raises:
            ScheduleError: the schedule is not defined for that number.
        """
        fewest = self.chunks_per_rank
        if chunks_per_rank is None:
            return fewest
        if self.more_chunks:
            require_at_least(fewest, f"chunks_per_rank of {self.name!r}", chunks_per_rank)
        elif type(chunks_per_rank) is not int or chunks_per_rank != fewest:
            raise ScheduleError(
                f"The schedule {self.name!r} has {fewest} chunk{'s' if fewest > 1 else ''} on each rank. Received: "
                f"chunks_per_rank={chunks_per_rank!r}. The nearest legal value is {fewest}; 'interleaved' takes 1, "
                "'interleaved_1f1b' 2 or more"
            )
        return int(chunks_per_rank)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            Schedule("simple", simple),
            Schedule("interleaved", interleaved),
            Schedule("interleaved_1f1b", interleaved_1f1b, chunks_per_rank=2, more_chunks=True),
            Schedule("zb_h1", zb_h1, splits_backward=True),
            Schedule("zb_v", zb_v, in_a_v, chunks_per_rank=2, splits_backward=True),
            Schedule("v_half", v_half, in_a_v, chunks_per_rank=2, splits_backward=True),
            Schedule("v_min", v_min, in_a_v, chunks_per_rank=2, splits_backward=True),
        )
    }
)
"""Every schedule by its name."""

IN_ORDER = ("interleaved", "zb_h1", "simple", "interleaved_1f1b", "zb_v", "v_half", "v_min")
"""All of them, in the order in which a search of plans tries them: of two that are as fast it takes the first."""

LEAN = ("v_half", "v_min")
"""Those that keep less and take longer than `zb_v`: worth a try only where memory is limited."""

#: The schedules that have an order for chunks on any ranks.
_ANYWHERE: Mapping[str, Callable[[Sequence[int], int], Ranks]] = MappingProxyType(
    {"simple": simple_over, "interleaved": interleaved_over}
)


@collection_put_off()
def build(
    kind: str,
    stages: int,
    microbatches: int,
    chunks_per_rank: int | None = None,
    *,
    backward: bool = True,
    sweeps: int = 2,
) -> Program:
    """Returns the program of a schedule: what every rank computes in one step, in order.

    Args:
        kind: a name in `SCHEDULES`.
        stages: how many ranks share the model, 1 or more.
        microbatches: how many microbatches a step runs, 1 or more.
        chunks_per_rank: how many chunks of the model each rank has; None for the fewest that the schedule takes.
        backward: False for a forward-only program, as evaluation needs it.
        sweeps: how often a microbatch crosses the stages. Each sweep after the second (backward) is appended to the
            program as T tasks.

    Returns:
        A program of compute tasks. `add_transfers` puts the sends and receives in.

    Raises:
        ScheduleError: there is no such schedule, or it is not defined for these numbers.

    Example:
        >>> print(build("interleaved", stages=2, microbatches=3).text())
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    schedule = _named(kind)
    require_at_least(1, "stages", stages)
    require_at_least(1, "microbatches", microbatches)
    require_at_least(2, "sweeps", sweeps)
    chunks_per_rank = schedule.chunks_for(chunks_per_rank)
    if not backward and sweeps > 2:
        raise ScheduleError(
            "Sweeps after the second come after backward, so a program without backward has none. "
            f"Received: backward=False, sweeps={sweeps}. Use sweeps=2 or backward=True"
        )
    ranks = schedule.order(stages, microbatches, chunks_per_rank)
    program = Program(tuple(map(tuple, ranks)), microbatches, stages * chunks_per_rank, sweeps=2)
    return with_sweeps(program, sweeps) if backward else forward_only(program)


def _named(kind: str) -> Schedule:
    schedule = SCHEDULES.get(kind)
    if schedule is None:
        nearest = difflib.get_close_matches(str(kind), SCHEDULES, n=1, cutoff=0.4)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ScheduleError(f"A schedule is one of {', '.join(map(repr, SCHEDULES))}. Received: {kind!r}.{hint}")
    return schedule


def placement_of(schedule: str, stages: int, chunks_per_rank: int | None = None) -> tuple[int, ...]:
    """Returns the rank of every chunk in a named or written schedule.

    Args:
        schedule: a name in `SCHEDULES`, or the text of a schedule as `schedule_file` reads it.
        stages: how many ranks share the model.
        chunks_per_rank: how many chunks each rank has; None for the fewest. A written schedule says it itself.

    Raises:
        ScheduleError: there is no such schedule, it is not defined for these numbers, or its text is wrong.

    Example:
        >>> placement_of("zb_v", 3)
        (0, 1, 2, 2, 1, 0)
    """
    if not is_named(schedule):
        return load_schedule(schedule, stages).placement()
    found = _named(schedule)
    return found.placement(stages, found.chunks_for(chunks_per_rank))


def runs_on(schedule: str, placement: Sequence[int]) -> bool:
    """Returns whether a schedule has an order for chunks on these ranks.

    Args:
        schedule: a name in `SCHEDULES`, or the text of a schedule.
        placement: the rank of every chunk.
    """
    if not is_named(schedule):
        return load_schedule(schedule).placement() == tuple(placement)
    if schedule in _ANYWHERE:
        return True
    found, stages = _named(schedule), 1 + max(placement)
    each, left = divmod(len(placement), stages)
    takes = each >= found.chunks_per_rank if found.more_chunks else each == found.chunks_per_rank
    return takes and not left and found.placement(stages, each) == tuple(placement)


@collection_put_off()
def program_of(
    schedule: str, placement: Sequence[int], microbatches: int, *, backward: bool = True, sweeps: int = 2
) -> Program:
    """Returns the program of a named or written schedule, for chunks on given ranks.

    Args:
        schedule: a name in `SCHEDULES`, or the text of a schedule as `schedule_file` reads it.
        placement: the rank of every chunk. "simple" and "interleaved" take any, others only that of `placement_of`.
        microbatches: how many microbatches a step runs, 1 or more.
        backward: False for a forward-only program, as evaluation needs it.
        sweeps: how often a microbatch crosses the stages. Sweeps after the second are T tasks.

    Raises:
        ScheduleError: there is no such schedule, its text is wrong, or it has chunks on other ranks.

    Example:
        >>> print(program_of("interleaved", (0, 1, 0), 1).text())
        0F0 2F0 2B0 0B0
        1F0 1B0
    """
    placement, stages = tuple(placement), 1 + max(placement)
    if is_named(schedule):
        _named(schedule)
        require_at_least(1, "microbatches", microbatches)
        each = len(placement) // stages
        if placement == looped(stages) or schedule not in _ANYWHERE:
            program = build(schedule, stages, microbatches, each)
        else:
            ranks = _ANYWHERE[schedule](placement, microbatches)
            program = Program(tuple(map(tuple, ranks)), microbatches, len(placement), sweeps=2)
    else:
        program = load_schedule(schedule, stages, microbatches)
    if program.placement() != placement:
        raise ScheduleError(
            f"The schedule {schedule if is_named(schedule) else 'that was written'!r} has chunks on ranks "
            f"{program.placement()}. Received: chunks on ranks {placement}. 'simple' and 'interleaved' take any ranks"
        )
    return with_sweeps(program, sweeps) if backward else forward_only(program)


def is_named(schedule: str) -> bool:
    """Returns whether a text is a schedule's name, known or not, and no schedule. No name begins with a number."""
    return not schedule[:1].isdigit()

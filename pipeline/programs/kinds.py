"""The table of what is known of each kind of task. All code that handles tasks asks it.

A new kind of task needs a row here and, where ranks run it, an emitter in `run/emitters.py`, and nothing else. A kind
that a pass puts into the list is made together with its row, in a line above the table.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from smp_tf.pipeline.programs.chunk_times import TaskTimes
from smp_tf.pipeline.programs.places import Places
from smp_tf.pipeline.programs.prices import Prices
from smp_tf.pipeline.task import Index, Kind, Program, Task


class Busy(enum.Enum):
    """What part of a rank is busy while a task runs."""

    #: The rank itself, which runs one such task after the other, in the order of its list.
    RANK = enum.auto()
    #: The rank's line to the other replicas: one such task after the other, while the rank computes.
    LINE = enum.auto()
    #: Nothing. The task goes on next to all else, and no task of its rank waits for it because of its place.
    NOTHING = enum.auto()
    #: A message, which travels next to all else.
    MESSAGE = enum.auto()


class Holds(enum.Enum):
    """How a task changes what is in a stage's memory."""

    #: It reads and makes the tensors of a segment.
    SEGMENT = enum.auto()
    #: It brings a tensor from another stage.
    RECEIVED = enum.auto()
    #: It keeps a tensor until another stage has it.
    SENT = enum.auto()
    #: It makes what the optimizer needs besides weights and slots.
    UPDATE = enum.auto()
    #: It changes nothing that is counted by task.
    NOTHING = enum.auto()


class StashChange(enum.Enum):
    """What a task does to the activations that its chunk keeps of a microbatch for backward."""

    BEGINS = enum.auto()
    ENDS = enum.auto()
    #: It ends the stash where the caller says that this piece of a backward in two does so.
    MAY_END = enum.auto()
    IS_LEFT = enum.auto()


class Phase(enum.Enum):
    """When the ops of a task are written."""

    #: With the step.
    STEP = enum.auto()
    #: With the update of weights, after the step.
    UPDATE = enum.auto()
    #: With what is computed once of the batches of all replicas, after the step and before the update.
    JOIN = enum.auto()
    #: With what is logged, after the update.
    LOG = enum.auto()


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of a kind of task.

    Attributes:
        needs: takes the places of tasks, the rank and the task, and returns the numbers of the tasks that must end
            before it begins.
        seconds: takes the times of a program and the task, and returns how long the task takes.
        part: what the time of a rank that runs such a task counts as: a part of `measure/step_anatomy.py`.
        color: colour of a task in a picture; None where it is not drawn. People who see colours differently can tell
            the colours apart (Okabe and Ito, 2008).
        words: what it stands for, in a legend.
        busy: what part of the rank is busy while it runs.
        holds: how it changes what is in memory.
        stash: what it does to the activations that are kept for backward.
        begins_early: whether it may begin within the last task that adds to its bucket.
        phase: when its ops are written.
        alone: which share of its time it takes while the other ranks of its host wait; None where it takes all of it.
        price: returns how long it takes by what it moves, where it is done once a step; None where its time is given.
    """

    needs: Callable[[Places, int, Task], tuple[int, ...]]
    seconds: Callable[[TaskTimes, Task], float]
    part: str
    color: str | None
    words: str
    busy: Busy = Busy.RANK
    holds: Holds = Holds.NOTHING
    stash: StashChange = StashChange.IS_LEFT
    begins_early: bool = False
    phase: Phase = Phase.STEP
    alone: Literal["forward", "backward"] | None = None
    price: Callable[[Prices, Task], float] | None = None


def once(times: TaskTimes, task: Task) -> float:
    """Returns how long a task takes that runs once per step."""
    return times.once.get(task, 0.0)


def _extra(times: TaskTimes, task: Task) -> float:
    assert task.sweep is not None
    return times.of_chunk(task).extra.get(task.sweep, 0.0)


#: Add up over the replicas how much their gradients count.
WEIGH = Kind("WEIGH", Index.BUCKET)
#: Average gradients over replicas.
REDUCE = Kind("REDUCE", Index.BUCKET)
#: Update weights.
APPLY = Kind("APPLY", Index.BUCKET)
#: Compare the batch of this rank with that of the replica's first rank.
CHECK = Kind("CHECK", Index.BUCKET)
#: Send a few numbers to the first stage, such as squares for a norm.
TELL = Kind("TELL", Index.BUCKET)
#: Add up those of all stages.
SUM = Kind("SUM", Index.BUCKET)
#: Bring together what the replicas have made of their samples.
JOIN = Kind("JOIN", Index.BUCKET)
#: Average over replicas what a loop logs of a batch.
LOG = Kind("LOG", Index.BUCKET)


def of_averages(places: Places, rank: int, task: Task) -> tuple[int, ...]:
    """Returns what a task needs that reads gradients after their average over the replicas."""
    return (*places.of_gradients(rank, task), *places.of_bucket(REDUCE, task))


def of_all_averages(places: Places, rank: int, task: Task) -> tuple[int, ...]:
    """Returns what a task needs that reads all gradients of its stage after they were averaged."""
    return of_averages(places, rank, Task(task.kind, task.chunk))


def of_stage_sum(places: Places, rank: int, task: Task) -> tuple[int, ...]:
    """Returns what a SUM needs: on the first rank its own numbers and all others', on the others what comes of them."""
    others = range(1, places.program.stages) if rank == 0 else (rank,)
    told = [places.number_of(Task(TELL, other, bucket=task.bucket)) for other in others]
    if rank > 0:
        return (*told, places.number_of(Task(SUM, 0, bucket=task.bucket)))
    return (*of_all_averages(places, rank, task), *told)


def of_update(places: Places, rank: int, task: Task) -> tuple[int, ...]:
    """Returns what an APPLY needs: the averages of its bucket, and what the stages have put together before."""
    return (*of_averages(places, rank, task), *places.of_kind[SUM, task.chunk])


KINDS: dict[Kind, Row] = {
    Kind.F: Row(
        Places.of_compute, lambda times, task: times.of_chunk(task).forward, "compute", "#56b4e9", "forward",
        holds=Holds.SEGMENT, stash=StashChange.BEGINS, alone="forward",
    ),
    Kind.B: Row(
        Places.of_compute, lambda times, task: times.of_chunk(task).backward, "compute", "#e69f00", "backward",
        holds=Holds.SEGMENT, stash=StashChange.ENDS, alone="backward",
    ),
    Kind.I: Row(
        Places.of_compute, lambda times, task: times.of_chunk(task).input_gradient, "compute",
        "#e69f00", "backward, what the stage before waits for",
        holds=Holds.SEGMENT, stash=StashChange.MAY_END, alone="backward",
    ),
    Kind.W: Row(
        Places.of_weight_gradients, lambda times, task: times.of_chunk(task).weight_gradient, "compute",
        "#f0e442", "backward, gradients of weights",
        holds=Holds.SEGMENT, stash=StashChange.MAY_END, alone="backward",
    ),
    Kind.T: Row(
        Places.of_compute, _extra, "compute", "#009e73", "what needs gradients of several stages", holds=Holds.SEGMENT,
    ),
    Kind.SEND: Row(
        Places.of_send, once, "message", None, "a tensor is sent to another stage",
        busy=Busy.MESSAGE, holds=Holds.SENT,
    ),
    Kind.RECV: Row(
        Places.of_receive, once, "message", None, "a tensor is received from another stage",
        busy=Busy.MESSAGE, holds=Holds.RECEIVED,
    ),
    WEIGH: Row(
        Places.of_nothing, once, "reduce", "#cc79a7", "weigh: how much the gradients of each replica count",
        busy=Busy.LINE, price=Prices.of_weigh,
    ),
    REDUCE: Row(
        Places.of_gradients, once, "reduce", "#cc79a7", "reduce: gradients over replicas",
        busy=Busy.LINE, begins_early=True, price=Prices.of_reduce,
    ),
    APPLY: Row(
        of_update, once, "apply", "#999999", "apply: the optimizer",
        holds=Holds.UPDATE, phase=Phase.UPDATE, price=Prices.of_apply,
    ),
    CHECK: Row(
        Places.of_others, once, "input", "#0072b2", "check: do all ranks of a replica have the same batch",
        busy=Busy.NOTHING, price=Prices.of_check,
    ),
    TELL: Row(
        of_all_averages, once, "reduce", None, "tell: numbers for the first stage",
        phase=Phase.UPDATE, price=Prices.of_tell,
    ),
    SUM: Row(
        of_stage_sum, once, "reduce", "#cc79a7", "sum: norms and checks over stages",
        phase=Phase.UPDATE, price=Prices.of_sum,
    ),
    JOIN: Row(
        Places.of_gradients, once, "other", "#cc79a7", "join: what is made of samples, of all replicas",
        busy=Busy.LINE, phase=Phase.JOIN, price=Prices.of_weigh,
    ),
    LOG: Row(
        Places.of_gradients, once, "other", "#cc79a7", "log: what is logged of a batch, over replicas",
        busy=Busy.LINE, phase=Phase.LOG, price=Prices.of_weigh,
    ),
}  # fmt: skip


def duration(times: TaskTimes) -> Callable[[Task], float]:
    """Returns how long tasks take, as a function of the task.

    Args:
        times: of the program's tasks.
    """
    return lambda task: KINDS[task.kind].seconds(times, task)


def priced(program: Program, prices: Prices) -> dict[Task, float]:
    """Returns how long the tasks take that are done once a step, by what they move.

    Args:
        program: with these tasks.
        prices: what they are priced by.
    """
    found: dict[Task, float] = {}
    for tasks in program.ranks:
        for task in tasks:
            price = KINDS[task.kind].price
            if price is not None:
                found[task] = price(prices, task)
    return found

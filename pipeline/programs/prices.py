"""What the tasks take that are done once a step, by what they move: the one place that says it.

WEIGH        a number goes around the ring of the replicas, after the wait for a sum to begin
REDUCE       gradients go around it, after the same wait: a rank sends and receives 2 (r - 1) / r of them
APPLY        gradients are read, weights and slots read and written; shared ones then go around the ring
TELL, SUM    a message to the first stage, and one back
CHECK        the batch is read, on one step of many

Source of the ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from smp_tf.pipeline.programs.due_steps import EVERY
from smp_tf.pipeline.task import Task


def ring_seconds(nbytes: float, replicas: int, rate: float) -> float:
    """Returns the seconds in which replicas add up what each has.

    Args:
        nbytes: of each.
        replicas: their number.
        rate: bytes a second from one to the next.
    """
    return 2 * (replicas - 1) / replicas * nbytes / rate


@dataclass(frozen=True)
class Speeds:
    """How fast the ranks of a stage are.

    Args:
        memory: bytes a second that one reads or writes.
        ring: bytes a second from one replica to the next.
        wait: seconds until a sum over the replicas begins, once all of them have come to it.
    """

    memory: float
    ring: float
    wait: float = 0.0


@dataclass(frozen=True)
class Prices:
    """What is known of a step and of its ranks, by which tasks are priced that are done once a step.

    Args:
        stages: how fast the ranks of each stage are.
        op_seconds: seconds to start an op.
        replicas: how many train at the same time.
        trained: bytes of the weights that each stage trains.
        buckets: bytes of the gradients that are averaged together, by stage and number.
        slots: the optimizer's slots per weight, in sizes of the weight.
        slot_shares: among how many replicas the slots of a stage are shared.
        batch: bytes of the batch.
    """

    stages: tuple[Speeds, ...]
    op_seconds: float
    replicas: int = 1
    trained: tuple[float, ...] = ()
    buckets: Mapping[tuple[int, int], float] = field(default_factory=dict)
    slots: float = 0.0
    slot_shares: int = 1
    batch: float = 0.0

    def of_weigh(self, task: Task) -> float:
        """Returns the seconds of a WEIGH: a number passes every replica twice."""
        return self.stages[task.chunk].wait + 2 * (self.replicas - 1) * self.op_seconds

    def of_reduce(self, task: Task) -> float:
        """Returns the seconds of a REDUCE."""
        speeds = self.stages[task.chunk]
        return speeds.wait + ring_seconds(self._bytes_of(task), self.replicas, speeds.ring)

    def of_apply(self, task: Task) -> float:
        """Returns the seconds of an APPLY, what replicas that share slots then give each other included."""
        nbytes, speeds = self._bytes_of(task), self.stages[task.chunk]
        # Gradients are read; weights and slots are read and written.
        seconds = (3 + 2 * self.slots) * nbytes / self.slot_shares / speeds.memory
        if self.slot_shares > 1:
            seconds += ring_seconds(nbytes, self.replicas, speeds.ring) / 2
        return seconds

    def of_tell(self, task: Task) -> float:
        """Returns the seconds of a TELL: one message."""
        return self.op_seconds

    def of_sum(self, task: Task) -> float:
        """Returns the seconds of a SUM: two messages for every other stage on the first one, one on the others."""
        return self.op_seconds * (1 if task.chunk else 2 * (len(self.stages) - 1))

    def of_check(self, task: Task) -> float:
        """Returns the seconds of a CHECK: the mean over all steps of a training."""
        return self.batch / self.stages[task.chunk].memory / EVERY

    def _bytes_of(self, task: Task) -> float:
        return self.trained[task.chunk] if task.bucket is None else self.buckets[task.chunk, task.bucket]

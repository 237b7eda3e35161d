"""What is known of a step's output when its program is built, before any batch comes.

A call only adds the tensors of its batch to the description. The result is a `StepOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from smp_tf.partition.spread import EVERYWHERE, Spread


@dataclass(frozen=True)
class OutputHolder:
    """Which ranks have an output.

    Args:
        stage: the stage that makes it, and alone keeps it where it is not sent to all; None where all stages make it.
        replica: the replica that alone gets the sum of a gradient over the replicas; None where all of them do.
        is_here: whether this rank has it.
    """

    stage: int | None = None
    replica: int | None = None
    is_here: bool = True

    def __str__(self) -> str:
        if self.is_here:
            return ""
        return f", on partition {self.stage}" + (f" of replica {self.replica}" if self.replica is not None else "")


@dataclass(frozen=True)
class GradientSum:
    """What the sum of a gradient over the microbatches is a sum of.

    Args:
        spread: how it lies over the replicas. Where it is partial, it is of this replica alone, and its weight is this
            replica's share. Else it is over all replicas, too, and may be of rows of a weight.
        device: the device that holds it, and that computes the average; None for where the gradient is made.
        has_values: whether the gradient of each microbatch is kept, too.
    """

    spread: Spread = EVERYWHERE
    device: str | None = None
    has_values: bool = False


@dataclass(frozen=True)
class OutputDescription:
    """What is known of an output.

    Args:
        name: what it is, for messages.
        holder: which ranks have it.
        gradient: what its sum is, where it was computed from gradients; else None.
        follows_state: whether it was computed from a variable that the step writes.
    """

    name: str
    holder: OutputHolder = field(default_factory=OutputHolder)
    gradient: GradientSum | None = None
    follows_state: bool = False

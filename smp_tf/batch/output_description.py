"""What is known of a step's output when its program is built, before any batch comes.

A call only adds the tensors of its batch to the description. The result is a `StepOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
        is_averaged: whether it is over all replicas, too. Else it is of this replica alone, and its weight is this
            replica's share.
        rows: the rows of a weight that it is of; None for all.
        device: the device that holds it, and that computes the average; None for where the gradient is made.
        has_values: whether the gradient of each microbatch is kept, too.
    """

    is_averaged: bool = True
    rows: tuple[int, int] | None = None
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

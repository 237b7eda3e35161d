"""What is known of a step's output when its program is built, before any batch comes.

A call asks nobody: it adds the tensors of its batch to the description, and that is a `StepOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OutputHolder:
    """Which ranks have an output.

    Args:
        stage: the stage that makes it, and alone keeps it where it is not sent to all; None where all make it.
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
        is_averaged: whether it is over all replicas too. Else it is of this one alone, and its weight is the share of
            this replica.
        rows: of which rows of a weight it is; None: of all.
        device: where it is, and where the average is computed; None for where the gradient is made.
        has_values: whether the gradient of each microbatch is kept besides.
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

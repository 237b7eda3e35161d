"""Errors of tracing, placing and splitting a step."""


class PartitionError(ValueError):
    """A step cannot be cut as asked."""


class TraceError(PartitionError):
    """The step function cannot be traced into one graph of one microbatch."""


class PlacementError(PartitionError):
    """No legal placement of the model over the stages exists."""


class MemoryLimitError(PlacementError):
    """Every placement needs more bytes on some rank than the rank may need.

    Attributes:
        needed: bytes that the fullest rank would need at least, where that is known.
        excess: the most bytes by which a rank exceeds its limit.
    """

    needed: int | None = None
    excess: float = 0.0


class GraphError(PartitionError):
    """An op graph breaks a rule that every pass relies on."""

"""The errors that smp_tf raises, in one place for `except` clauses."""

from __future__ import annotations

from smp_tf.ops.errors import (
    LibraryError,
    NotDifferentiableError,
    PeerError,
    TransportCancelledError,
    TransportError,
    TransportTimeoutError,
)
from smp_tf.ops.plain_text import plain_text
from smp_tf.partition.errors import GraphError, MemoryLimitError, PartitionError, PlacementError, TraceError
from smp_tf.pipeline.errors import ProgramError, ScheduleError, TaskTextError

__all__ = [
    "AlreadyInitializedError",
    "CheckpointError",
    "ConfigError",
    "EnvironmentSetupError",
    "GraphError",
    "LauncherError",
    "LibraryError",
    "MemoryLimitError",
    "MessageError",
    "NotDifferentiableError",
    "NotInitializedError",
    "OfflinePlanError",
    "OwnershipError",
    "PartitionError",
    "PeerError",
    "PlacementError",
    "ProgramError",
    "RankMismatchError",
    "ScheduleError",
    "StepError",
    "TaskTextError",
    "TimelineError",
    "TraceError",
    "TransportCancelledError",
    "TransportError",
    "TransportTimeoutError",
]


class EnvironmentSetupError(RuntimeError):
    """The process is not set up for smp_tf: a variable, a version or the order of imports is wrong."""


class ConfigError(ValueError):
    """A configuration key is unknown, mistyped, or does not fit the others."""


class NotInitializedError(RuntimeError):
    """smp_tf was used before `smp.init()` or after `smp.shutdown()`."""


class AlreadyInitializedError(RuntimeError):
    """`smp.init()` was called again with another configuration."""


class LauncherError(RuntimeError):
    """A launcher started more processes than Horovod can see."""


class RankMismatchError(RuntimeError):
    """Ranks that must agree differ, or one of them did not answer."""

    def __str__(self) -> str:
        """Returns the message, which may repeat what other ranks have said."""
        return plain_text(super().__str__())


class MessageError(RuntimeError):
    """A message between ranks could not be sent, received or understood."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit what it is restored into."""


class OwnershipError(RuntimeError):
    """A variable was read or written on a rank that does not store it."""


class StepError(ValueError):
    """A step function, its arguments or its results cannot be used as asked."""


class TimelineError(ValueError):
    """A timeline cannot be recorded as asked, or a file is no timeline."""


class OfflinePlanError(ValueError):
    """The object to be planned is no model, or cannot be called with the given inputs."""


def _survive_autograph() -> None:
    """Lets an error that is raised while TensorFlow traces a function reach the caller with its own type.

    AutoGraph makes such an error anew, with the user's source lines in its message. It does so only for types whose
    constructor is that of `Exception`. Any other error becomes AutoGraph's StagingError, which no script would catch.
    """
    for name in __all__:
        globals()[name].__init__ = Exception.__init__


_survive_autograph()

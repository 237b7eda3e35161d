"""What `smp.init` has built, for all that need it until `smp.shutdown`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from smp_tf.config.config import Config
from smp_tf.errors import NotInitializedError
from smp_tf.job.topology import Topology

if TYPE_CHECKING:
    from smp_tf.job.channel import ControlChannel
    from smp_tf.ops.transport import Transport
    from smp_tf.partition.plan.plan_file import PlanFile


class Groups(Protocol):
    """The groups of this rank in which collectives run. A group of one has none."""

    @property
    def mp(self) -> Any:
        """Returns the group of the ranks of this rank's replica."""

    @property
    def dp(self) -> Any:
        """Returns the group of the ranks that hold the same weights as this one."""

    @property
    def owned(self) -> tuple[Any, ...]:
        """Returns all groups that smp_tf added."""


@dataclasses.dataclass(frozen=True)
class Runtime:
    """One initialised smp_tf.

    Args:
        given: The configuration as checked, before the world's size completed it.
        config: The configuration in force: `partitions` and `horovod` are set.
        topology: This rank's place in the world.
        process_sets: The Horovod groups of this rank.
        seed: The seed all ranks share: the configured one, or the one rank 0 drew.
        transport: The connection to all ranks; None in a world of one process.
        control: Agreements and barriers between ranks.
        plan_file: The plans to run with; None where plans are made.
    """

    given: Config
    config: Config
    topology: Topology
    process_sets: Groups
    seed: int
    transport: Transport | None
    control: ControlChannel
    plan_file: PlanFile | None = None


_current: Runtime | None = None
_starts = 0


def current() -> Runtime:
    """Returns the runtime in force.

    Raises:
        NotInitializedError: `smp.init` was not called, or `smp.shutdown` was.
    """
    if _current is None:
        raise NotInitializedError(
            "smp_tf is not initialised. Call smp.init() first, at the top of the script, for "
            'example: smp.init({"partitions": 2, "microbatches": 4})'
        )
    return _current


def current_or_none() -> Runtime | None:
    """Returns the runtime in force, if there is one."""
    return _current


def install(runtime: Runtime | None) -> None:
    """Puts a runtime in force, or none. Only init and shutdown do this."""
    global _current, _starts
    _current = runtime
    _starts += runtime is not None


def starts() -> int:
    """Returns how many times smp_tf was initialised in this process, the same on all ranks."""
    return _starts

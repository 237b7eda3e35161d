"""A job that starts or runs, as its parts know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smp_tf.config.config import Config
from smp_tf.job.topology import Topology
from smp_tf.start.start_watch import StartWatch

if TYPE_CHECKING:
    from smp_tf.collectives.process_sets import ProcessSets, World
    from smp_tf.ops.transport import Transport
    from smp_tf.partition.plan.plan_file import PlanFile
    from smp_tf.watch.failure import FailureHooks
    from smp_tf.watch.steps import StepWatch


@dataclass(eq=False)
class Job:
    """A job of this process, from its start to its end. Each part that is started adds what it knows.

    Args:
        given: the configuration as checked.
        watch: says whom the start waits for.
        at_exit: called when Python ends before the job does.
        others_time: seconds to wait for the goodbyes of others when this rank leaves.
        launched: whether a launcher started this process.
        world: where this process is.
        config: the configuration in force.
        reads, huge_pages: whether this process may read others' memory, and use huge pages.
        hellos: what every rank said about itself.
        exchange: gives every rank what every rank says.
        plan_file: the plans to run with; None where plans are made.
        topology: this rank's place in the world.
        transport: the connection to all ranks; None in a world of one process.
        seed: the seed that all ranks share.
        hooks: tell other ranks how this one ends; None in a world of one process.
        steps: watches over steps; None in a world of one process.
        process_sets: the groups in which collectives run.
    """

    given: Config
    watch: StartWatch
    at_exit: Callable[[], None]
    others_time: float = 0.0
    launched: bool = field(init=False)
    world: World = field(init=False)
    config: Config = field(init=False)
    reads: bool = field(init=False)
    huge_pages: bool = field(init=False)
    hellos: Sequence[Mapping[str, Any]] = field(init=False)
    exchange: Callable[..., list[bytes]] = field(init=False)
    plan_file: PlanFile | None = field(init=False)
    topology: Topology = field(init=False)
    transport: Transport | None = field(init=False, default=None)
    seed: int = field(init=False)
    hooks: FailureHooks | None = field(init=False, default=None)
    steps: StepWatch | None = field(init=False, default=None)
    process_sets: ProcessSets = field(init=False)

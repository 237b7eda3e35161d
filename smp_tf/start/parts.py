"""The parts of a job, each with its start and its stop, in the order in which they start.

smp.init       from the first to the last
smp.shutdown   from the last to the first
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

from smp_tf.announce import announce
from smp_tf.collectives import horovod_waits
from smp_tf.collectives.forked_children import hook_forks
from smp_tf.job.agreement import require_agreement
from smp_tf.job.at_shutdown import run_before_leaving
from smp_tf.job.topology import Topology
from smp_tf.partition.mesh import CommGroup, Mesh
from smp_tf.start import arrivals, connection, hosts
from smp_tf.start.environment import make_horovod_wait, require_dynamic_process_sets, rest_horovod, without_horovod
from smp_tf.start.job import Job
from smp_tf.start.launcher import check_world, is_launched
from smp_tf.version import __version__
from smp_tf.watch import steps
from smp_tf.watch.failure import FailureHooks
from smp_tf.watch.replicas import ReplicaWatch
from smp_tf.watch.steps import StepWatch

# TensorFlow and Horovod must be checked before they are imported, so functions import them.


@dataclass(frozen=True)
class JobPart:
    """A part of a job.

    Args:
        what: words for the part.
        start: starts the part, and adds to the job what it knows.
        stop: stops the part; None where there is nothing to stop.
        is_left_at_exit: whether the part is left as it is when Python ends before the job does, without the other
            ranks.
    """

    what: str
    start: Callable[[Job], None] = lambda job: None
    stop: Callable[[Job], None] | None = None
    is_left_at_exit: bool = False


def start(job: Job) -> None:
    """Starts all parts of a job.

    Args:
        job: a new job.
    """
    for part in PARTS:
        part.start(job)


def stop(job: Job, *, at_exit: bool = False) -> None:
    """Ends all parts of a job, in the opposite order.

    Args:
        job: the running job.
        at_exit: whether Python ends.
    """
    for part in reversed(PARTS):
        if part.stop is not None and not (at_exit and part.is_left_at_exit):
            part.stop(job)


def _start_horovod(job: Job) -> None:
    try:
        from smp_tf.collectives import process_sets
    except ImportError as error:
        raise without_horovod(error) from error
    job.launched = is_launched()
    rest_horovod(job.given.partitions)
    make_horovod_wait(job.given.stall_timeout)
    require_dynamic_process_sets()
    process_sets.start_horovod(job.watch)
    hook_forks()


def _find_place(job: Job) -> None:
    from smp_tf.collectives import process_sets

    job.world = process_sets.world()
    check_world(job.world.size, process_sets.built_with())
    job.config = job.given.for_world(job.world.size, launched=job.launched)
    job.reads, job.huge_pages = hosts.may_read_memory(), hosts.may_use_huge_pages()
    job.exchange = functools.partial(process_sets.exchange_bytes, lost=job.watch.arrivals.lost)


def _share_devices(job: Job) -> None:
    """Sets threads and GPU before the first op, since that fixes them for the process."""
    from smp_tf.start import devices

    world = job.world
    notes = [
        *job.config.notes,
        devices.share_threads(job.config, world.local_size),
        devices.pin_gpu(world.local_rank, world.local_size),
    ]
    for note in notes:
        if note is not None:
            announce(note, world.rank)


def _greet(job: Job) -> None:
    """Exchanges where the ranks are, and checks that all of them run the same thing."""
    import tensorflow as tf

    from smp_tf.collectives.process_sets import exchange_bytes
    from smp_tf.job.seeds import script_seed

    hello = {
        **arrivals.this_process(),
        "seed": job.config.seed if job.config.seed is not None else script_seed(),
        "must agree": {
            "configuration": job.config.as_json(),
            "smp_tf version": __version__,
            "TensorFlow version": tf.__version__,
        },
    }
    said = exchange_bytes(json.dumps(hello).encode(), "smp_tf.hello", lost=job.watch.arrivals.lost)
    hellos = [json.loads(text) for text in said]
    require_agreement(
        "what smp.init was given",
        {rank: hello["must agree"] for rank, hello in enumerate(hellos)},
        lambda rank: arrivals.in_words(rank, hellos[rank]),
        "Give every rank the same configuration and the same installed versions.",
    )
    job.watch.arrivals.met(hellos)
    job.hellos = hellos


def _read_plans(job: Job) -> None:
    from smp_tf.planning import partition_file

    job.plan_file = partition_file.load(job.config, job.world.rank, job.exchange)


def _form_mesh(job: Job) -> None:
    world, config = job.world, job.config
    job.topology = Topology(
        mesh=Mesh(world.size, config.partitions or 1, config.placement_strategy),
        rank=world.rank,
        local_rank=world.local_rank,
        local_size=world.local_size,
        hosts=tuple(hello["host"] for hello in job.hellos),
        pids=tuple(hello["pid"] for hello in job.hellos),
    )


def _seed(job: Job) -> None:
    from smp_tf.job.seeds import seed_everything

    job.seed = job.hellos[0]["seed"]
    seed_everything(job.seed)


def _hook_failures(job: Job) -> None:
    """Sets the hooks that tell the other ranks how this one ends."""
    if job.transport is not None:
        job.hooks = FailureHooks(job.transport, job.topology.describe(job.topology.rank))
        job.hooks.install()


def _unhook_failures(job: Job) -> None:
    if job.hooks is not None:
        job.hooks.remove()
        job.hooks = None


def _watch_steps(job: Job) -> None:
    topology = job.topology
    if job.transport is None:
        return
    replicas = [rank for rank in topology.members(CommGroup.RDP_GROUP) if rank != topology.rank]
    replica_watch = ReplicaWatch(
        job.transport, replicas, topology.describe, steps.named, job.config.stall_timeout, members=horovod_waits.members
    )
    job.steps = StepWatch(job.transport, topology.describe, other_look=replica_watch.look)
    job.steps.start()
    # A crash in native code then shows the line of Python where it happened.
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(file=sys.__stderr__)


def _stop_watching(job: Job) -> None:
    if job.steps is not None:
        job.steps.stop()
        job.steps = None


def _hook_exit(job: Job) -> None:
    """Registers the end of the job at Python's end. Horovod's callback was registered before, so it runs after."""
    if job.transport is not None:
        atexit.register(job.at_exit)


def _unhook_exit(job: Job) -> None:
    atexit.unregister(job.at_exit)


def _add_process_sets(job: Job) -> None:
    from smp_tf.collectives import process_sets

    job.process_sets = process_sets.add_process_sets(job.topology.mesh, job.world.rank)


def _remove_process_sets(job: Job) -> None:
    from smp_tf.collectives.process_sets import remove_process_sets

    remove_process_sets(job.process_sets.owned)


PARTS = (
    JobPart("Horovod", _start_horovod),
    JobPart("this rank's place and configuration", _find_place),
    JobPart("threads and GPU", _share_devices),
    JobPart("greeting", _greet),
    JobPart("plan file", _read_plans),
    JobPart("mesh", _form_mesh),
    JobPart("transport", connection.open_transport, connection.leave),
    JobPart("seeds", _seed),
    JobPart("failure hooks", _hook_failures, _unhook_failures),
    JobPart("watch over steps", _watch_steps, _stop_watching),
    JobPart("what is done before leaving", stop=lambda job: run_before_leaving()),
    JobPart("exit hook", _hook_exit, _unhook_exit),
    JobPart("process sets", _add_process_sets, _remove_process_sets, is_left_at_exit=True),
)

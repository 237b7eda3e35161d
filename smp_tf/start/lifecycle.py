"""`smp.init` and `smp.shutdown`: everything that is built before a model, and ended after it.

init      Horovod ─▶ threads, GPU ─▶ greeting ─▶ plan file ─▶ transport ─▶ process sets ─▶ seeds ─▶ hooks
shutdown  callbacks ─▶ barrier ─▶ process sets ─▶ threads ─▶ hooks ─▶ goodbye ─▶ transport ─▶ state of the job
exit      threads ─▶ goodbye ─▶ those of all others, where Horovod averages; unless an exception has ended all ranks
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from smp_tf.announce import announce, tell_in_time
from smp_tf.collectives import horovod_waits
from smp_tf.collectives.forked_children import hook_forks
from smp_tf.config.config import Config, load_config
from smp_tf.errors import AlreadyInitializedError
from smp_tf.job import runtime
from smp_tf.job.agreement import require_agreement
from smp_tf.job.at_shutdown import run_at_shutdown, run_before_leaving
from smp_tf.job.channel import ControlChannel
from smp_tf.job.runtime import Runtime
from smp_tf.job.topology import Topology
from smp_tf.job_state import drop_all
from smp_tf.partition.mesh import CommGroup, Mesh
from smp_tf.start import arrivals, hosts, job_secret
from smp_tf.start.environment import (
    make_horovod_wait,
    require_dynamic_process_sets,
    require_tensorflow,
    rest_horovod,
)
from smp_tf.start.launcher import check_world, is_launched
from smp_tf.start.start_watch import StartWatch
from smp_tf.version import __version__
from smp_tf.watch import steps
from smp_tf.watch.failure import FailureHooks
from smp_tf.watch.replicas import ReplicaWatch
from smp_tf.watch.steps import StepWatch

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

_GOODBYE_TIME = 2.0
# How long a rank that is done waits for the others; then it is taken that they wait for it.
_OTHERS_TIME = 30.0

_hooks: FailureHooks | None = None
_watch: StepWatch | None = None


def init(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Starts smp_tf; the first call of a script.

    Starts Horovod, pins a GPU where there are any, builds the groups, opens the transport and seeds
    Python, NumPy and TensorFlow alike on all ranks. A second call with the same configuration does
    nothing.

    Args:
        config: A mapping, the path of a JSON or YAML file, or None for the JSON in the environment
            variable SM_HP_MP_PARAMETERS, or the defaults when that is not set.

    Raises:
        ConfigError: A key or value is not allowed, or partitions and processes do not fit.
        AlreadyInitializedError: smp_tf runs with another configuration.
        EnvironmentSetupError: TensorFlow, tf_keras or Horovod are missing or unfit.
        LauncherError: A launcher started more processes than Horovod can see.
        RankMismatchError: The ranks were given different configurations.

    Example:
        >>> smp.init({"partitions": 2, "microbatches": 4})
    """
    given = load_config(config)
    running = runtime.current_or_none()
    if running is not None:
        _require_same(running.given, given)
        return
    with StartWatch(given.stall_timeout) as watch:
        require_tensorflow()
        started = _start(given, watch)
    runtime.install(started)


def shutdown() -> None:
    """Ends groups, transport and plans; afterwards `smp.init` may be called again.

    Every rank must call it. Does nothing when smp_tf is not initialised.

    Raises:
        PeerError: A rank ended before.
        CheckpointError: Steps have left state of a restored checkpoint over.

    Example:
        >>> smp.shutdown()
        >>> smp.init({"microbatches": 4})
    """
    running = runtime.current_or_none()
    if running is None:
        return
    run_at_shutdown()
    from smp_tf.collectives.process_sets import remove_process_sets

    # No rank says goodbye while another still works with it.
    topology = running.topology
    running.control.allgather(None, range(topology.size), "smp.shutdown")
    remove_process_sets(running.process_sets.owned)
    _leave(running)
    drop_all()


def _leave(running: Runtime, others_time: float = 0.0) -> None:
    """Says goodbye and closes the transport, in good order; also runs when Python ends."""
    global _hooks, _watch
    atexit.unregister(_leave_at_exit)
    run_before_leaving()
    if _watch is not None:
        _watch.stop()
        _watch = None
    if _hooks is not None:
        _hooks.remove()
        _hooks = None
    if running.transport is not None:
        _name_unclaimed(running.transport, running.topology)
        running.transport.goodbye(_GOODBYE_TIME)
        if others_time:
            running.transport.await_goodbyes(range(running.topology.size), others_time)
        running.transport.close()
    runtime.install(None)


def _name_unclaimed(transport: Transport, topology: Topology) -> None:
    """Says, on the rank they were sent to, which messages of the script nobody has received."""
    for source, count in sorted(transport.unclaimed().items()):
        tell_in_time(
            f"smp_tf: rank {topology.rank} ends without having received {count} message{'s' * (count > 1)} that rank "
            f"{source} sent. Each smp.send, and each smp.broadcast on every other rank of the group, needs one "
            f"smp.recv_from."
        )


def _leave_at_exit() -> None:
    running = runtime.current_or_none()
    if running is None or os.getpid() != running.topology.pids[running.topology.rank]:
        return  # ended already, or a child that the script forked
    if _hooks is not None and _hooks.failed:
        # The transport stays until Python has ended: its thread ends a process that does not end by itself.
        if _watch is not None:
            _watch.stop()
    else:
        # Horovod ends for all ranks when it ends on one, and those of other stages may still average over replicas.
        _leave(running, _OTHERS_TIME if running.topology.replicas > 1 else 0.0)


def end_all(error: Exception) -> None:
    """Tells all ranks of an error that ends this one, where there are several; a command catches it and tells it here.

    Args:
        error: why it ends.
    """
    if _hooks is not None:
        _hooks.end_all(error)


def is_initialized() -> bool:
    """Returns whether `smp.init` was called and `smp.shutdown` was not.

    Returns:
        A bool.

    Example:
        >>> smp.is_initialized()
        True
    """
    return runtime.current_or_none() is not None


def _require_same(running: Config, asked: Config) -> None:
    if running == asked:
        return
    now, then = asked.as_json(), running.as_json()
    changed = ", ".join(f"{name} ({then[name]!r} now, {now[name]!r} asked)" for name in now if now[name] != then[name])
    raise AlreadyInitializedError(
        f"smp_tf is already initialised with another configuration: {changed}. Call "
        "smp.shutdown() before smp.init() with new values."
    )


def _start(given: Config, watch: StartWatch) -> Runtime:
    # These import TensorFlow and Horovod, which must be known to be the right ones first.
    from smp_tf.collectives import process_sets
    from smp_tf.job.seeds import seed_everything
    from smp_tf.planning import partition_file
    from smp_tf.start import devices

    launched = is_launched()
    rest_horovod(given.partitions)
    make_horovod_wait(given.stall_timeout)
    require_dynamic_process_sets()
    process_sets.start_horovod(watch)
    hook_forks()
    world = process_sets.world()
    check_world(world.size, process_sets.built_with())
    config = given.for_world(world.size, launched=launched)
    reads, huge_pages = hosts.may_read_memory(), hosts.may_use_huge_pages()

    # Before the first op, which fixes the threads and devices of the process.
    notes = [
        *config.notes,
        devices.share_threads(config, world.local_size),
        devices.pin_gpu(world.local_rank, world.local_size),
    ]
    for note in notes:
        if note is not None:
            announce(note, world.rank)

    hellos = _greet(config, watch)
    watch.arrivals.met(hellos)
    exchange = functools.partial(process_sets.exchange_bytes, lost=watch.arrivals.lost)
    plan_file = partition_file.load(config, world.rank, exchange)
    mesh = Mesh(world.size, config.partitions or 1, config.placement_strategy)
    topology = Topology(
        mesh=mesh,
        rank=world.rank,
        local_rank=world.local_rank,
        local_size=world.local_size,
        hosts=tuple(hello["host"] for hello in hellos),
        pids=tuple(hello["pid"] for hello in hellos),
    )
    transport = None
    if world.size > 1:
        transport = _open_transport(config, topology, hellos, launched, reads, huge_pages, exchange, watch)
    seed = hellos[0]["seed"]
    seed_everything(seed)
    _watch_over(transport, topology, config.stall_timeout)
    return Runtime(
        given=given,
        config=config,
        topology=topology,
        process_sets=process_sets.add_process_sets(mesh, world.rank),
        seed=seed,
        transport=transport,
        control=ControlChannel(world.rank, transport, config.stall_timeout, topology.describe),
        plan_file=plan_file,
    )


def _open_transport(
    config: Config,
    topology: Topology,
    hellos: Sequence[Mapping[str, Any]],
    launched: bool,
    reads: bool,
    huge_pages: bool,
    exchange: Callable[[bytes, str], list[bytes]],
    watch: StartWatch,
) -> Transport:
    """Connects this rank to all others, which prove that they know the job's secret."""
    from smp_tf.ops.transport import Transport, TransportOptions

    machines = [hello["machine"] for hello in hellos]
    single_host = len(set(machines)) == 1
    note = hosts.note_on_network(single_host)
    if note is not None:
        announce(note, topology.rank)
    given = job_secret.given()
    if not single_host and not given:
        announce(job_secret.NOTE, topology.rank)
    options = TransportOptions(
        single_host=single_host,
        local_size=topology.local_size,
        watch_launcher=launched,
        # The watch over the start hears them until all are connected, where it does.
        watch_signals=not watch.hears_signals,
        read_memory=reads,
        huge_pages=huge_pages,
        stall_report_s=min(30.0, config.stall_timeout),
        stall_timeout_s=config.stall_timeout,
        network_devices=hosts.network_devices(),
    )
    transport = Transport.open(topology.rank, topology.size, options)
    try:
        secret, addresses = job_secret.agree(given, transport.address, exchange, topology.describe)
        transport.connect(
            addresses,
            secret,
            timeout=config.stall_timeout,
            while_waiting=lambda ranks: watch.await_others(lambda: ranks),
        )
        watch.await_others()
        watch.leave_signals()
        transport.watch_signals()
        note = hosts.note_on_reading(reads, machines, topology.rank, transport.reads_memory)
        if note is not None:
            # Once per host.
            announce(note, topology.local_rank)
    except BaseException:
        transport.close()
        raise
    return transport


def _watch_over(transport: Transport | None, topology: Topology, stall_timeout: float) -> None:
    """Tells the other ranks how this one ends, from here on."""
    global _hooks, _watch
    if transport is None:
        return
    _hooks = FailureHooks(transport, topology.describe(topology.rank))
    _hooks.install()
    replicas = [rank for rank in topology.members(CommGroup.RDP_GROUP) if rank != topology.rank]
    replica_watch = ReplicaWatch(
        transport, replicas, topology.describe, steps.named, stall_timeout, members=horovod_waits.members
    )
    _watch = StepWatch(transport, topology.describe, beside=replica_watch.look)
    _watch.start()
    # A crash in native code shows where it happened, in Python's terms.
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(file=sys.__stderr__)
    # Horovod's own atexit callback was registered before, so it runs after this one.
    atexit.register(_leave_at_exit)


def _greet(config: Config, watch: StartWatch) -> list[dict[str, Any]]:
    """Returns the exchanges who is where, and checks that all ranks run the same thing."""
    import tensorflow as tf

    from smp_tf.collectives.process_sets import exchange_bytes
    from smp_tf.job.seeds import script_seed

    hello = {
        **arrivals.this_process(),
        "seed": config.seed if config.seed is not None else script_seed(),
        "must agree": {
            "configuration": config.as_json(),
            "smp_tf version": __version__,
            "TensorFlow version": tf.__version__,
        },
    }
    said = exchange_bytes(json.dumps(hello).encode(), "smp_tf.hello", lost=watch.arrivals.lost)
    hellos = [json.loads(text) for text in said]
    require_agreement(
        "what smp.init was given",
        {rank: hello["must agree"] for rank, hello in enumerate(hellos)},
        lambda rank: arrivals.in_words(rank, hellos[rank]),
        "Give every rank the same configuration and the same installed versions.",
    )
    return hellos

"""Opens the transport of a job to all ranks when it starts, and leaves it with a goodbye when it ends."""

from __future__ import annotations

from smp_tf.announce import announce, tell_in_time
from smp_tf.start import hosts, job_secret
from smp_tf.start.job import Job

_GOODBYE_TIME = 2.0


def open_transport(job: Job) -> None:
    """Connects this rank to all others, which prove that they know the job's secret.

    Args:
        job: the job, which knows this rank's place and the other ranks. A world of one process has no transport.
    """
    # It loads TensorFlow, whose version must be checked first.
    from smp_tf.ops.transport import Transport, TransportOptions

    if job.world.size == 1:
        return
    machines = [hello["machine"] for hello in job.hellos]
    single_host = len(set(machines)) == 1
    note = hosts.note_on_network(single_host)
    if note is not None:
        announce(note, job.topology.rank)
    given = job_secret.given()
    if not single_host and not given:
        announce(job_secret.NOTE, job.topology.rank)
    options = TransportOptions(
        single_host=single_host,
        local_size=job.topology.local_size,
        watch_launcher=job.launched,
        # Where the watch over the start hears signals, it does so until all are connected.
        watch_signals=not job.watch.hears_signals,
        read_memory=job.reads,
        huge_pages=job.huge_pages,
        stall_report_s=min(30.0, job.config.stall_timeout),
        stall_timeout_s=job.config.stall_timeout,
        network_devices=hosts.network_devices(),
    )
    transport = Transport.open(job.topology.rank, job.topology.size, options)
    try:
        secret, addresses = job_secret.agree(given, transport.address, job.exchange, job.topology.describe)
        transport.connect(
            addresses,
            secret,
            timeout=job.config.stall_timeout,
            while_waiting=lambda ranks: job.watch.await_others(lambda: ranks),
        )
        job.watch.await_others()
        job.watch.leave_signals()
        transport.watch_signals()
        note = hosts.note_on_reading(job.reads, machines, job.topology.rank, transport.reads_memory)
        if note is not None:
            # Once per host.
            announce(note, job.topology.local_rank)
    except BaseException:
        transport.close()
        raise
    job.transport = transport


def leave(job: Job) -> None:
    """Says goodbye to the other ranks, in good order, and closes the transport.

    Args:
        job: the job that ends.
    """
    if job.transport is None:
        return
    _name_unclaimed(job)
    job.transport.goodbye(_GOODBYE_TIME)
    if job.others_time:
        job.transport.await_goodbyes(range(job.topology.size), job.others_time)
    job.transport.close()


def _name_unclaimed(job: Job) -> None:
    """Says which messages of the script to this rank nobody has received."""
    assert job.transport is not None
    for source, count in sorted(job.transport.unclaimed().items()):
        tell_in_time(
            f"smp_tf: rank {job.topology.rank} ends without having received {count} message{'s' * (count > 1)} that "
            f"rank {source} sent. Each smp.send, and each smp.broadcast on every other rank of the group, needs one "
            f"smp.recv_from."
        )

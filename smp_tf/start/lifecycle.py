"""`smp.init` and `smp.shutdown`, which build and end everything that a model needs.

init      the parts of `smp_tf/start/parts.py`, one after the other
shutdown  callbacks ─▶ barrier ─▶ the parts backwards
exit      the parts backwards, but process sets; unless an exception has ended all ranks
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from smp_tf.config.config import Config, load_config
from smp_tf.errors import AlreadyInitializedError
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import run_at_shutdown
from smp_tf.job.channel import ControlChannel
from smp_tf.job.runtime import Runtime
from smp_tf.job_state import drop_all
from smp_tf.start import parts
from smp_tf.start.environment import require_tensorflow
from smp_tf.start.job import Job
from smp_tf.start.start_watch import StartWatch

# Seconds that a rank which is done waits for the others. Then they are assumed to wait for it.
_OTHERS_TIME = 30.0

_job: Job | None = None


def init(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Starts smp_tf.

    It is the first call of a script.

    It starts Horovod, pins a GPU where there are any, builds the groups, opens the transport, and gives Python, NumPy
    and TensorFlow the same seed on all ranks. A second call with the same configuration does nothing.

    Args:
        config: A mapping; the path of a JSON or YAML file; or None for the JSON in the environment variable
            SM_HP_MP_PARAMETERS, and for the defaults when that is not set.

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
    """Ends groups, transport and plans.

    Afterwards `smp.init` may be called again.

    Every rank must call it. It does nothing when smp_tf is not initialised.

    Raises:
        PeerError: A rank ended before.
        CheckpointError: State of a restored checkpoint is left that no step has taken.

    Example:
        >>> smp.shutdown()
        >>> smp.init({"microbatches": 4})
    """
    running = runtime.current_or_none()
    if running is None:
        return
    run_at_shutdown()
    # No rank says goodbye while another still needs it.
    topology = running.topology
    running.control.allgather(None, range(topology.size), "smp.shutdown")
    _stop()
    drop_all()


def _stop(*, at_exit: bool = False) -> None:
    """Ends the parts of the running job, also when Python ends."""
    global _job
    # A runtime that smp.init did not build, such as a test's own, has no parts.
    if _job is not None:
        parts.stop(_job, at_exit=at_exit)
        _job = None
    runtime.install(None)


def _leave_at_exit() -> None:
    running = runtime.current_or_none()
    if running is None or os.getpid() != running.topology.pids[running.topology.rank]:
        return  # it has ended already, or this is a child that the script forked
    if _job is None:
        return
    if _job.hooks is not None and _job.hooks.failed:
        # The transport stays until Python has ended, since its thread ends a process that does not end by itself.
        if _job.steps is not None:
            _job.steps.stop()
    else:
        # When Horovod ends on one rank, it ends for all. Ranks of other stages may still average over replicas.
        _job.others_time = _OTHERS_TIME if running.topology.replicas > 1 else 0.0
        _stop(at_exit=True)


def end_all(error: Exception) -> None:
    """Tells all ranks of an error that ends this one. A command that catches the error calls it.

    Args:
        error: the error that ends it.
    """
    if _job is not None and _job.hooks is not None:
        _job.hooks.end_all(error)


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
    global _job
    job = _job = Job(given, watch, _leave_at_exit)
    parts.start(job)
    return Runtime(
        given=given,
        config=job.config,
        topology=job.topology,
        process_sets=job.process_sets,
        seed=job.seed,
        transport=job.transport,
        control=ControlChannel(job.world.rank, job.transport, job.config.stall_timeout, job.topology.describe),
        plan_file=job.plan_file,
    )

"""`smp.init` and `smp.shutdown`: everything that is built before a model, and ended after it."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

from smp_tf import runtime
from smp_tf.announce import announce
from smp_tf.agreement import require_agreement
from smp_tf.config import Config, load_config
from smp_tf.environment import require_tensorflow
from smp_tf.errors import AlreadyInitializedError
from smp_tf.launcher import check_world, is_launched
from smp_tf.runtime import Runtime
from smp_tf.topology import Grid, Topology

_at_shutdown: list[Callable[[], None]] = []


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
        EnvironmentSetupError: TensorFlow, tf_keras or Horovod are missing, unfit or started wrongly.
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
    runtime.install(_start(given))


def shutdown() -> None:
    """Ends groups, transport and plans; afterwards `smp.init` may be called again.

    Every rank must call it. Does nothing when smp_tf is not initialised.
    """
    running = runtime.current_or_none()
    if running is None:
        return
    while _at_shutdown:
        _at_shutdown.pop()()
    from smp_tf.process_sets import remove_process_sets

    remove_process_sets(running.process_sets)
    runtime.install(None)


def is_initialized() -> bool:
    """Whether `smp.init` was called and `smp.shutdown` was not."""
    return runtime.current_or_none() is not None


def on_shutdown(callback: Callable[[], None]) -> None:
    """Registers what `smp.shutdown` does first, last registered first."""
    _at_shutdown.append(callback)


def _require_same(running: Config, asked: Config) -> None:
    if running == asked:
        return
    now, then = asked.as_json(), running.as_json()
    changed = ", ".join(
        f"{name} ({then[name]!r} now, {now[name]!r} asked)" for name in now if now[name] != then[name]
    )
    raise AlreadyInitializedError(
        f"smp_tf is already initialised with another configuration: {changed}. Call "
        "smp.shutdown() before smp.init() with new values."
    )


def _start(given: Config) -> Runtime:
    require_tensorflow()
    # These import TensorFlow and Horovod, which must be known to be the right ones first.
    from smp_tf import devices, process_sets

    launched = is_launched()
    process_sets.start_horovod()
    world = process_sets.world()
    check_world(world.size, process_sets.built_with())
    config = given.for_world(world.size, launched=launched)

    # Before the first op, which fixes the threads and devices of the process.
    notes = [
        *config.notes,
        devices.share_threads(config, world.local_size),
        devices.pin_gpu(world.local_rank, world.local_size),
    ]
    for note in notes:
        if note is not None:
            announce(note, world.rank)

    hellos = _greet(config)
    grid = Grid(world.size, config.partitions or 1, config.placement_strategy)
    topology = Topology(
        grid=grid,
        rank=world.rank,
        local_rank=world.local_rank,
        local_size=world.local_size,
        hosts=tuple(hello["host"] for hello in hellos),
        pids=tuple(hello["pid"] for hello in hellos),
    )
    seed = hellos[0]["seed"]
    _seed_everything(seed)
    return Runtime(
        given=given,
        config=config,
        topology=topology,
        process_sets=process_sets.add_process_sets(grid, world.rank),
        seed=seed,
    )


def _greet(config: Config) -> list[dict[str, Any]]:
    """Exchanges who is where, and checks that all ranks run the same thing."""
    import tensorflow as tf

    import smp_tf
    from smp_tf.process_sets import exchange_bytes

    hello = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "seed": config.seed if config.seed is not None else secrets.randbits(32),
        "must agree": {
            "configuration": config.as_json(),
            "smp_tf version": smp_tf.__version__,
            "TensorFlow version": tf.__version__,
        },
    }
    said = exchange_bytes(json.dumps(hello).encode(), "smp_tf.hello")
    hellos = [json.loads(text) for text in said]
    require_agreement(
        "what smp.init was given",
        {rank: hello["must agree"] for rank, hello in enumerate(hellos)},
        lambda rank: f"rank {rank} (host {hellos[rank]['host']}, pid {hellos[rank]['pid']})",
        "Give every rank the same configuration and the same installed versions.",
    )
    return hellos


def _seed_everything(seed: int) -> None:
    # The same seed on every rank of the world, not only of a replica: a script that shuffles a
    # data set before each replica takes its share, or splits off test data, must do so alike
    # everywhere. Ops in the step differ between replicas all the same: their keys hold the dp rank.
    import tf_keras

    tf_keras.utils.set_random_seed(seed)

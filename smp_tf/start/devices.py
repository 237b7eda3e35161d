"""Gives this process its share of the host's threads and GPUs."""

from __future__ import annotations

import os

import tensorflow as tf

from smp_tf.config.config import Config


def share_threads(config: Config, local_size: int) -> str | None:
    """Sets TensorFlow's threads per op, and how many ops it runs at once.

    Without this, several processes on a host would each start as many threads per op as there are cores, and slow each
    other down. One process alone keeps TensorFlow's own choice. As many ops at once as there are cores are not too many
    for several processes: while one of them waits in a pipeline, another has the cores to itself. The less they wait,
    the less this is worth (measured in docs/speed.md).

    Args:
        config: the configuration. `intra_op_threads` and `inter_op_threads` are used if they are set.
        local_size: The number of processes on this host.

    Returns:
        What to tell the user, if anything.
    """
    threading = tf.config.threading
    cores = len(os.sched_getaffinity(0))
    threads, at_once = config.intra_op_threads, config.inter_op_threads
    # A number that the user gave to TensorFlow directly stays in force.
    is_given = "TF_NUM_INTRAOP_THREADS" in os.environ or threading.get_intra_op_parallelism_threads() != 0
    if threads is None and local_size > 1 and not is_given:
        threads = max(1, cores // local_size)
    wanted = {
        f"its threads per op to {threads}": (threads, threading.set_intra_op_parallelism_threads),
        f"its ops at once to {at_once}": (at_once, threading.set_inter_op_parallelism_threads),
    }
    for words, (number, setter) in wanted.items():
        if number is None:
            continue
        try:
            setter(number)
        except RuntimeError:
            return (
                f"TensorFlow ran an op before smp.init(), so that it is too late to set {words}. Call smp.init() "
                f"first in the script."
            )
    if threads == config.intra_op_threads:
        return None
    from_environment = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    at_once = at_once or threading.get_inter_op_parallelism_threads()
    at_once = at_once or (int(from_environment) if from_environment.isdecimal() else cores)
    return (
        f"{local_size} processes share this host: {_number(threads, 'TensorFlow thread')} per op each, "
        f"{_number(at_once, 'op')} at once (set intra_op_threads and inter_op_threads to change it)."
    )


def _number(count: int | None, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def pin_gpu(local_rank: int, local_size: int) -> str | None:
    """Gives this process one GPU of its host, by local rank. Does nothing where there are none.

    Args:
        local_rank: This process's number on its host.
        local_size: The number of processes on its host.

    Returns:
        What to tell the user, if anything.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    mine = gpus[local_rank % len(gpus)]
    try:
        tf.config.set_visible_devices(mine, "GPU")
        if local_size > len(gpus):
            tf.config.experimental.set_memory_growth(mine, True)
    except RuntimeError:
        return (
            "TensorFlow used a GPU before smp.init(), so this process keeps all of its host's "
            "GPUs. Call smp.init() first in the script."
        )
    if local_size > len(gpus):
        return (
            f"{local_size} processes share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} on this "
            "host; their memory grows as needed."
        )
    return None

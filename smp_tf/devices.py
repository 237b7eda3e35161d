"""Threads and GPUs: this process's share of its host."""

from __future__ import annotations

import os

import tensorflow as tf

from smp_tf.config import Config


def share_threads(config: Config, local_size: int) -> str | None:
    """Sets TensorFlow's threads per op.

    Several processes on a host would each start as many threads as there are cores, and slow each
    other down. One process alone keeps TensorFlow's own choice.

    Args:
        config: `intra_op_threads` is used if it is set.
        local_size: The number of processes on this host.

    Returns:
        What to tell the user, if anything.
    """
    threads = config.intra_op_threads
    if threads is None:
        # A number the user gave to TensorFlow directly stays in force.
        if local_size == 1 or "TF_NUM_INTRAOP_THREADS" in os.environ:
            return None
        if tf.config.threading.get_intra_op_parallelism_threads() != 0:
            return None
        threads = max(1, len(os.sched_getaffinity(0)) // local_size)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        return (
            "TensorFlow ran an op before smp.init(), so the number of its threads can no longer be "
            f"set to {threads}. Call smp.init() first in the script."
        )
    if config.intra_op_threads is None:
        return (
            f"{local_size} processes share this host: {threads} TensorFlow "
            f"thread{'s' if threads > 1 else ''} per op each (set intra_op_threads to change it)."
        )
    return None


def pin_gpu(local_rank: int, local_size: int) -> str | None:
    """Gives this process one GPU of its host, by local rank; does nothing where there are none.

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

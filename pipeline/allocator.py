"""The bytes that TensorFlow's allocator counts: on the GPU where there is one, else of the CPU.

A GPU's allocator counts all tensors. That of a CPU counts with oneDNN only, and only tensors of 256 KiB or more.
Another one, which an environment variable chooses, counts all, with and without oneDNN.
"""

from __future__ import annotations

import os

import tensorflow as tf

#: Where this is true, TensorFlow takes an allocator on a CPU that counts all tensors.
COUNTS_ALL = "TF_CPU_ALLOCATOR_USE_BFC"
#: Bytes from which on the usual allocator of a CPU counts a tensor.
LARGE = 256 << 10


def in_use() -> int:
    """Returns the bytes that the allocator has given out now; 0 where it counts nothing."""
    return _counted("current")


def peak() -> int:
    """Returns the most bytes that the allocator has given out since `forget_peak`; 0 where it counts nothing."""
    return _counted("peak")


def counts() -> bool:
    """Returns whether the allocator counts."""
    before, held = in_use(), tf.zeros([LARGE])
    found = in_use() - before
    del held
    return found > 0


def counted_from() -> int:
    """Returns the bytes from which on the allocator counts a tensor, if it counts."""
    counts_all = os.environ.get(COUNTS_ALL, "").lower() in ("1", "true")
    return 0 if counts_all or tf.config.list_logical_devices("GPU") else LARGE


def forget_peak() -> None:
    """Makes the peak what is in use now. The allocator has to count."""
    tf.config.experimental.reset_memory_stats(_device())


def _device() -> str:
    gpus = tf.config.list_logical_devices("GPU")
    return gpus[0].name if gpus else "CPU:0"


def _counted(kind: str) -> int:
    try:
        return int(tf.config.experimental.get_memory_info(_device())[kind])
    except (ValueError, tf.errors.OpError):
        return 0

"""The region that the allocator takes for a stage, in a process in which nothing was allocated before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: What a stage of two large dense layers has: each weight is made with a temporary of its size, then come the slots.
SCRIPT = """
import sys

import tensorflow as tf

from smp_tf.planning.memory_region import take_region


def made(size):
    return tf.Variable(tf.random.uniform([size << 18]) * 2.0)


if sys.argv[1] == "region":
    take_region(100 << 20)
sizes = [9, 8]
weights = [made(size) for size in sizes]
slots = [tf.Variable(tf.zeros([size << 18])) for size in sizes for _ in range(2)]
info = tf.config.experimental.get_memory_info("CPU:0")
print(info["current"] >> 20, info["peak"] >> 20)
"""


@pytest.mark.parametrize(
    ("way", "current", "peak"), [("region", 51, 51), pytest.param("none", 64, 64, marks=pytest.mark.full)]
)
def test_what_stays_lies_in_pieces_of_its_size(way: str, current: int, peak: int) -> None:
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, way], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == [str(current), str(peak)]

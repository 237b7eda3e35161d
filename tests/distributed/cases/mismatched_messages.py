"""Messages that do not fit together, and large ones."""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np

import smp_tf as smp


def both_receive() -> dict[str, Any]:
    smp.recv_from(1 - smp.rank())
    return {}


def gather_and_broadcast() -> dict[str, Any]:
    """One rank gathers, the other broadcasts and goes on to a barrier."""
    if smp.rank() == 0:
        smp.allgather("mine")
    else:
        smp.broadcast("mine")
        smp.barrier()
    return {}


def both_send_what_is_large() -> dict[str, Any]:
    smp.send(np.zeros(1 << 20), 1 - smp.rank())
    return {}


def nobody_receives() -> dict[str, Any]:
    if smp.rank() == 0:
        smp.send("first", 1)
        smp.send("second", 1)
    else:
        assert smp.recv_from(0) == "first"
    smp.barrier()
    return {}


def large(count: int) -> dict[str, Any]:
    """Sends an array of `count` float64 numbers; says how much memory each side took beside it."""
    array = np.arange(count, dtype=np.float64) if smp.rank() == 0 else None
    smp.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    if smp.rank() == 0:
        smp.send({"array": array}, 1)
    else:
        array = smp.recv_from(0)["array"]
        array[0] += 1.0
    seconds = time.perf_counter() - began
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"seconds": seconds, "taken": taken, "bytes": array.nbytes, "last": array[-1], "first": array[0]}

"""Keeps the cores of this host from going to sleep, so that what is measured does not wait for one to wake up.

A core with nothing to do sleeps, and takes a while to wake: on a virtual machine, whose host gives it away meanwhile,
tens of microseconds. With `idle=poll` the kernel never lets one sleep; the same is done here by a process for each core
that runs only where nothing else does (SCHED_IDLE), and gives way at once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

#: Ends when whoever started it has, also where that was killed.
_SPIN = """
import os
import sys

core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, [core])
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print("here", flush=True)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def cores_awake() -> Iterator[list[int]]:
    """Keeps cores that this process may use from sleeping, within its context; gives the processes that see to it."""
    with contextlib.ExitStack() as stack:
        pids = []
        for core in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-c", _SPIN, str(core), str(os.getpid())]
            spinning = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(spinning.kill)
            assert spinning.stdout is not None
            if not spinning.stdout.readline():
                raise RuntimeError(f"what keeps core {core} awake has ended with {spinning.wait()}")
            pids.append(spinning.pid)
        yield pids

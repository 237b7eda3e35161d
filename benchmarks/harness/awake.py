"""Keeps the cores of this host awake, so that nothing measured waits for one to wake up.

A core with nothing to do sleeps, and takes a while to wake. On a virtual machine the host gives a sleeping core away,
and waking takes tens of microseconds. With `idle=poll` the kernel never lets a core sleep. Here a process for each core
does the same. It runs only where nothing else does (SCHED_IDLE), and gives way at once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

#: Ends after the process that started it, also when that one was killed.
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
    """Keeps the cores of this process awake within its context, and gives the processes that do so."""
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

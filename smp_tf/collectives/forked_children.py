"""Leaves to a process what is its own when a child that it has forked ends.

rank 1 ── os.fork ──▶ child ── sys.exit ──▶ what Python does at exit: neither goodbyes nor Horovod's end
                                 │
                                 └────────▶ what libraries do at exit: nothing (`smp_transport.h`)
"""

from __future__ import annotations

import atexit
import functools
import os


@functools.cache
def hook_forks() -> None:
    """Keeps children, from here on, from ending Horovod: its connections are those of the process that started it."""
    import horovod.tensorflow as hvd

    os.register_at_fork(after_in_child=functools.partial(atexit.unregister, hvd.shutdown))

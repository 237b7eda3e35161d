"""Keeps a forked child that ends from ending what belongs to its parent.

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
    """Keeps forked children from ending Horovod, whose connections belong to the process that started it."""
    import horovod.tensorflow as hvd

    os.register_at_fork(after_in_child=functools.partial(atexit.unregister, hvd.shutdown))

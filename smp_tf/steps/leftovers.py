"""Drops what making a program leaves in memory, before the program is written into a graph and runs."""

from __future__ import annotations

import gc

from smp_tf.job import runtime
from smp_tf.partition.graph.graph_caches import drop_graph_caches


def drop_graphs() -> None:
    """Drops the graphs that a program was made from, which nothing needs once it is built.

    TensorFlow's graphs refer to themselves, so they stay until Python looks for such garbage. Ranks of a pipeline look
    for it at once, before they take new memory. A process alone leaves it to Python.
    """
    drop_graph_caches()
    if runtime.current().transport is not None:
        gc.collect()

"""Tells what a step has written of a variable before one of its ops runs."""

from __future__ import annotations

from smp_tf.partition.graph.op_graph import OpGraph


def last_write_before(graph: OpGraph, number: int, variable: int) -> int | None:
    """Returns the node that writes a variable last before another node runs; None where none does.

    Ops that read or write the same variable wait for each other, in the order in which they were made.

    Args:
        graph: the step.
        number: the other node.
        variable: index of the variable.
    """
    before = graph.ancestors([number]) - {number}
    return max((n for n in before if variable in graph.nodes[n].writes), default=None)

"""Moves a model's own measurements, such as `add_metric` in a layer's call, out of the model.

    call of a layer:   hidden ──▶ mean ──▶ assign to the metric's sum ──▶ its result
                                  │        └──────────── leaves the call ───────────┘
                                  └ stays: an op of the layer

A metric is a variable of the script. It lives on every rank, while the ops of a model run on one. So the op that writes
it, and what follows from it, are taken out of the call, as if the step had run them on a tensor that the layer gave.
"""

from __future__ import annotations

import dataclasses

from smp_tf.partition.graph.op_graph import OpGraph


def leave_the_model(graph: OpGraph) -> OpGraph:
    """Returns the graph with measurements outside the layer calls that take them.

    Args:
        graph: a pruned op graph.

    Returns:
        The graph. It is the same graph where there are no measurements. It is also the same where other layers of the
        model use their results; placing such a graph is an error.
    """
    written = graph.written_states
    if not written:
        return graph
    measurements: set[int] = set()
    for number, node in enumerate(graph.nodes):
        touched = {*node.reads, *node.writes}
        if touched & written or not measurements.isdisjoint(graph.data_from[number]):
            if node.backward or any(graph.variables[v].in_model for v in touched):
                return graph
            measurements.add(number)
    taken_in = {graph.nodes[number].call for number in measurements if set(graph.nodes[number].writes) & written}
    around = set().union(*(_with_parents(graph, call) for call in taken_in))
    if any(graph.nodes[number].call not in around for number in measurements) or around == {0}:
        return graph
    nodes = tuple(
        dataclasses.replace(node, call=0) if number in measurements else node for number, node in enumerate(graph.nodes)
    )
    return dataclasses.replace(graph, nodes=nodes)


def _with_parents(graph: OpGraph, call: int) -> set[int]:
    """Returns a layer call, the calls around it, and call 0, which is outside all calls."""
    found = {0}
    current: int | None = call
    while current:
        found.add(current)
        current = graph.calls[current].parent
    return found

"""Takes out of a step the ops that nobody needs."""

from __future__ import annotations

from collections.abc import Collection

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.units.units import weight_derived


def prune(graph: OpGraph) -> OpGraph:
    """Returns the graph without ops that no output, no effect and no placement of a trained weight needs.

    Args:
        graph: the op graph of a step.
    """
    wanted = [t.node for t in graph.outputs] + [n for n, node in enumerate(graph.nodes) if node.stateful]
    wanted += _only_uses_of_trained(graph, graph.ancestors(wanted))
    return graph.subgraph(graph.ancestors(wanted))


def _only_uses_of_trained(graph: OpGraph, needed: Collection[int]) -> list[int]:
    """Returns the forward ops that use a weight, where its gradient is needed and none of these ops is.

    The gradient of a linear layer needs nothing of the layer's forward pass. But the ops that use a weight decide who
    stores it, so they stay. TensorFlow leaves them out of the segments, since nothing there reads them.
    """
    trained = {g.variable for g in graph.gradients if all(t.node in needed for t in g.tensors)}
    trained &= {v.index for v in graph.variables if v.in_model}
    if not trained:
        return []
    derived = weight_derived(graph)
    uses: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        if node.call == 0 or node.backward or number in derived:
            continue
        of_inputs = (derived.get(t.node, frozenset()) for t in node.inputs)
        for variable in trained.intersection({*node.reads}.union(*of_inputs)):
            uses.setdefault(variable, []).append(number)
    return [number for users in uses.values() if not any(n in needed for n in users) for number in users]
